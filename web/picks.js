// Draws which tokens were kept and where forecasts were wrong. The images that the node puts out are drawn by
// toma_core/overlay.py.

const DOT = "#ffd23f", DOT_EDGE = "rgba(0, 0, 0, 0.75)", EDGE = "rgba(255, 255, 255, 0.85)";
// From few to many: dark blue, purple, orange, light yellow. Readable without colour vision.
const SCALE = [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]];

/** Where a image of `aspect` (width / height) lies in a canvas. */
function place(canvas, aspect) {
  const width = Math.min(canvas.width, canvas.height * aspect), height = width / aspect;
  return { x: (canvas.width - width) / 2, y: (canvas.height - height) / 2, width, height };
}

/** colour of t in 0..1 on the scale, as [r, g, b] */
export function colour(t) {
  const at = Math.min(Math.max(t, 0), 1) * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  return SCALE[low].map((value, i) => Math.round(value + (at - low) * (SCALE[low + 1][i] - value)));
}

/** Dots on the darkened image, or on a plain grid. pick: {grid: [h, w], kept} */
export function drawKept(canvas, image, pick, aspect) {
  const context = canvas.getContext("2d"), [rows, columns] = pick.grid;
  const box = place(canvas, aspect ?? columns / rows);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#14161a";
  context.fillRect(box.x, box.y, box.width, box.height);
  if (image) {
    context.globalAlpha = 0.45;
    context.drawImage(image, box.x, box.y, box.width, box.height);
    context.globalAlpha = 1;
  } else drawGrid(context, box, pick.grid);
  const cell = Math.min(box.width / columns, box.height / rows), radius = Math.max(0.6, cell * 0.3);
  context.fillStyle = DOT;
  context.strokeStyle = DOT_EDGE;
  context.lineWidth = Math.max(0.5, radius * 0.3);
  context.beginPath();
  for (const token of pick.kept) {
    const x = box.x + ((token % columns) + 0.5) * (box.width / columns);
    const y = box.y + (Math.floor(token / columns) + 0.5) * (box.height / rows);
    context.moveTo(x + radius, y);
    context.arc(x, y, radius, 0, 2 * Math.PI);
  }
  if (cell > 4) context.stroke();
  context.fill();
}

function drawGrid(context, box, [rows, columns]) {
  if (box.width / columns < 4) return;
  context.strokeStyle = "#2b2f36";
  context.lineWidth = 1;
  context.beginPath();
  for (let row = 1; row < rows; row++) line(context, box.x, box.y + (row * box.height) / rows, box.width, 0);
  for (let column = 1; column < columns; column++)
    line(context, box.x + (column * box.width) / columns, box.y, 0, box.height);
  context.stroke();
}

function line(context, x, y, width, height) {
  context.moveTo(x, y);
  context.lineTo(x + width, y + height);
}

/** One colour a token: as a small image that is blown up without smoothing, with the edges of groups. */
function drawCells(canvas, pick, aspect, colourOf) {
  const context = canvas.getContext("2d"), [rows, columns] = pick.grid;
  const box = place(canvas, aspect ?? columns / rows);
  const small = new OffscreenCanvas(columns, rows), cells = new ImageData(columns, rows);
  pick.assignment.forEach((group, token) => cells.data.set([...colourOf(group), 255], token * 4));
  small.getContext("2d").putImageData(cells, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, box.x, box.y, box.width, box.height);
  context.imageSmoothingEnabled = true;
  drawEdges(context, box, pick);
}

function drawEdges(context, box, { grid: [rows, columns], assignment }) {
  const width = box.width / columns, height = box.height / rows;
  if (Math.min(width, height) < 3) return;
  context.strokeStyle = EDGE;
  context.lineWidth = Math.max(0.5, Math.min(1.5, width * 0.12));
  context.beginPath();
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const token = row * columns + column, x = box.x + column * width, y = box.y + row * height;
      if (column + 1 < columns && assignment[token] !== assignment[token + 1]) line(context, x + width, y, 0, height);
      if (row + 1 < rows && assignment[token] !== assignment[token + columns]) line(context, x, y + height, width, 0);
    }
  }
  context.stroke();
}

/** Each group of merged tokens in its mean colour, outlined. */
export function drawRegions(canvas, image, pick, aspect) {
  const [rows, columns] = pick.grid;
  const small = new OffscreenCanvas(columns, rows), context = small.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, columns, rows);
  const seen = context.getImageData(0, 0, columns, rows).data;
  const sums = [];
  pick.assignment.forEach((group, token) => {
    sums[group] ??= [0, 0, 0, 0];
    for (let channel = 0; channel < 3; channel++) sums[group][channel] += seen[token * 4 + channel];
    sums[group][3] += 1;
  });
  drawCells(canvas, pick, aspect, (group) => sums[group].slice(0, 3).map((sum) => sum / sums[group][3]));
}

/** How many tokens each kept one stands for, in all frames; returns the largest number. */
export function drawDensity(canvas, image, pick, aspect) {
  const counts = [];
  for (const group of pick.all ?? pick.assignment) counts[group] = (counts[group] ?? 0) + 1;
  const most = counts.reduce((a, b) => Math.max(a, b), 1);
  drawCells(canvas, pick, aspect, (group) => colour((counts[group] - 1) / Math.max(1, most - 1)));
  return most;
}

/** The part of a pick that lies in one frame: the token grid of a video has its frames one below the other. */
export function frameOf({ grid: [rows, columns], kept, assignment }, frame, frames) {
  if (frames < 2 || rows % frames) return { grid: [rows, columns], kept, assignment };
  const high = rows / frames, from = Math.min(frame, frames - 1) * high * columns, to = from + high * columns;
  const inside = kept.filter((token) => token >= from && token < to).map((token) => token - from);
  return { grid: [high, columns], kept: inside, assignment: assignment.slice(from, to), all: assignment };
}

/** Where a forecast was wrong: bytes [rows x columns] as colours over the grey image. */
export function drawError(canvas, image, { size: [rows, columns], bytes }, aspect) {
  const context = canvas.getContext("2d"), box = place(canvas, aspect);
  const small = new OffscreenCanvas(columns, rows), cells = new ImageData(columns, rows);
  bytes.forEach((byte, i) => cells.data.set([...colour(byte / 255), 30 + Math.round((225 * byte) / 255)], i * 4));
  small.getContext("2d").putImageData(cells, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#000";
  context.fillRect(box.x, box.y, box.width, box.height);
  context.filter = "grayscale(1) brightness(0.45)";
  context.drawImage(image, box.x, box.y, box.width, box.height);
  context.filter = "none";
  context.imageSmoothingEnabled = false;
  context.drawImage(small, box.x, box.y, box.width, box.height);
  context.imageSmoothingEnabled = true;
}

/** An image as it is, darkened. */
export function drawDark(canvas, image) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!image) return;
  const box = place(canvas, image.width / image.height);
  context.globalAlpha = 0.35;
  context.drawImage(image, box.x, box.y, box.width, box.height);
  context.globalAlpha = 1;
}

/** The colour scale itself, left to right. */
export function drawScale(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = `rgb(${colour(x / (canvas.width - 1)).join()})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}
