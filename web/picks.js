// Draws which tokens were kept. The pictures that the node puts out are drawn by toma_core/overlay.py.

const DOT = "#ffd23f", DOT_EDGE = "rgba(0, 0, 0, 0.75)", EDGE = "rgba(255, 255, 255, 0.85)";
// From few to many: dark blue, purple, orange, light yellow. Readable without colour vision.
const SCALE = [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]];

/** Where a picture of `aspect` (width / height) lies in a canvas. */
function place(canvas, aspect) {
  const width = Math.min(canvas.width, canvas.height * aspect), height = width / aspect;
  return { x: (canvas.width - width) / 2, y: (canvas.height - height) / 2, width, height };
}

/** colour of t in 0..1 on the scale, as [r, g, b] */
export function colour(t) {
  const at = Math.min(Math.max(t, 0), 1) * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  return SCALE[low].map((value, i) => Math.round(value + (at - low) * (SCALE[low + 1][i] - value)));
}

/** Dots on the darkened picture, or on a plain grid. pick: {grid: [h, w], kept} */
export function drawKept(canvas, picture, pick, aspect) {
  const context = canvas.getContext("2d"), [rows, columns] = pick.grid;
  const box = place(canvas, aspect ?? columns / rows);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#14161a";
  context.fillRect(box.x, box.y, box.width, box.height);
  if (picture) {
    context.globalAlpha = 0.45;
    context.drawImage(picture, box.x, box.y, box.width, box.height);
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

/** One colour a token: as a small picture that is blown up without smoothing, with the edges of groups. */
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
export function drawRegions(canvas, picture, pick, aspect) {
  const [rows, columns] = pick.grid;
  const small = new OffscreenCanvas(columns, rows), context = small.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, columns, rows);
  const seen = context.getImageData(0, 0, columns, rows).data;
  const sums = Array.from({ length: pick.kept.length }, () => [0, 0, 0, 0]);
  pick.assignment.forEach((group, token) => {
    for (let channel = 0; channel < 3; channel++) sums[group][channel] += seen[token * 4 + channel];
    sums[group][3] += 1;
  });
  drawCells(canvas, pick, aspect, (group) => sums[group].slice(0, 3).map((sum) => sum / sums[group][3]));
}

/** How many tokens each kept one stands for; returns the largest number. */
export function drawDensity(canvas, picture, pick, aspect) {
  const counts = new Array(pick.kept.length).fill(0);
  for (const group of pick.assignment) counts[group] += 1;
  const most = Math.max(...counts);
  drawCells(canvas, pick, aspect, (group) => colour((counts[group] - 1) / Math.max(1, most - 1)));
  return most;
}

/** The colour scale itself, left to right. */
export function drawScale(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = `rgb(${colour(x / (canvas.width - 1)).join()})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}
