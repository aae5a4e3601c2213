// On the ToMAPreview node: look through all that was recorded, without running again.
import { api } from "../../scripts/api.js";
import { addElement, chain, fitCanvas, make, onOutput, widgetOf } from "./dom.js";
import { drawDensity, drawKept, drawRegions, drawScale } from "./picks.js";
import { say } from "./text.js";

const DRAW = { "kept tokens": drawKept, regions: drawRegions, density: drawDensity };

export function addPreview(node) {
  const view = buildView(node);
  addElement(node, "picks", view.root, () => 260);
  for (const name of ["step", "blocks", "style"]) {
    const widget = widgetOf(node, name);
    if (widget) chain(widget, "callback", view.draw);
  }
  onOutput(node, "toma", view.load);
  view.draw();
}

function buildView(node) {
  const canvas = make("canvas");
  const message = make("div", { className: "toma-message" });
  const stage = make("div", { className: "toma-stage" }, canvas, message);
  const slider = make("input", { type: "range", min: 1, max: 1, step: 1, value: 1 });
  const groups = make("div", { className: "toma-switch", role: "radiogroup" });
  const pictures = make("div", { className: "toma-switch", role: "radiogroup" });
  const scale = make("canvas", { width: 128, height: 1, className: "toma-scale" });
  const most = make("span"), legend = make("div", { className: "toma-legend" }, "1", scale, most);
  const caption = make("div", { className: "toma-caption" });
  caption.setAttribute("aria-live", "polite");
  const controls = make("div", { className: "toma-controls" }, slider, groups, pictures);
  const root = make("div", { className: "toma toma-preview" }, stage, controls, legend, caption);
  let data = null, images = [], picture = 0, loads = 0;
  drawScale(scale);

  const value = (name) => widgetOf(node, name)?.value;
  const set = (name, to) => {
    const widget = widgetOf(node, name);
    if (widget) widget.value = to;
  };
  const draw = () => {
    const recorded = data?.picks.length && images.length;
    controls.hidden = caption.hidden = !recorded;
    message.hidden = Boolean(recorded);
    legend.hidden = true;
    message.textContent = data ? data.message || say("unmerged") : say("noPicks");
    slider.setAttribute("aria-label", say("stepLabel"));
    groups.setAttribute("aria-label", say("blocksLabel"));
    pictures.setAttribute("aria-label", say("pictureLabel"));
    if (recorded) drawPick();
    else drawPicture();
  };
  const drawPicture = () => {
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!images.length) return;
    const image = images[picture], fit = Math.min(canvas.width / image.width, canvas.height / image.height);
    const width = image.width * fit, height = image.height * fit;
    context.globalAlpha = 0.35;
    context.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
    context.globalAlpha = 1;
  };
  const drawPick = () => {
    const step = Math.min(value("step") || data.steps, data.steps);
    const group = data.groups.includes(value("blocks")) ? value("blocks") : data.groups[0];
    const pick = pickAt(data, group, step - 1);
    slider.max = data.steps;
    slider.value = step;
    check(groups, group);
    check(pictures, String(picture + 1));
    const kept = pick.kept[picture % pick.kept.length], assignment = pick.assignment[picture % pick.kept.length];
    const [rows, columns] = pick.grid, image = images[picture], style = value("style");
    const shown = { grid: pick.grid, kept, assignment };
    const largest = (DRAW[style] ?? drawKept)(canvas, image, shown, image.width / image.height);
    legend.hidden = style !== "density";
    most.textContent = `${largest} ${say("density")}`;
    const share = Math.round((100 * kept.length) / (rows * columns));
    const where = say(whatHappens(data, pick, step - 1), { s: step, n: data.steps, at: pick.step + 1 });
    caption.textContent = `${where} · ${say("counted", { k: kept.length, total: rows * columns, share })}`;
  };
  const buildControls = () => {
    const pick = (name) => () => (set("blocks", name), draw());
    groups.replaceChildren(...data.groups.map((name) => option(name, pick(name))));
    groups.hidden = data.groups.length < 2;
    const turn = (i) => () => ((picture = i), draw());
    pictures.replaceChildren(...images.map((_, i) => option(String(i + 1), turn(i))));
    pictures.hidden = images.length < 2;
  };
  slider.addEventListener("input", () => (set("step", Number(slider.value)), draw()));
  fitCanvas(canvas, draw);

  return {
    root,
    draw,
    async load(output) {
      if (!output) return;
      const load = ++loads;
      try {
        const [recorded, loaded] = await Promise.all([fetchPicks(output.picks), Promise.all(output.images.map(fetchImage))]);
        if (load !== loads) return; // a newer one has overtaken it
        data = recorded;
        images = loaded;
        picture = Math.min(picture, images.length - 1);
        buildControls();
      } catch (error) {
        data = { picks: [], groups: [], message: String(error) };
      }
      draw();
    },
  };
}

/** The pick in force at a step (counted from 0): the last one made, or the first that will be. */
function pickAt(data, group, step) {
  const picks = data.picks.filter((pick) => pick.group === group);
  return picks.findLast((pick) => pick.step <= step) ?? picks[0];
}

function whatHappens(data, pick, step) {
  if (data.actions[step] === "LEAVE") return "left";
  return pick.step > step ? "notYet" : "chosenAt";
}

function option(name, choose) {
  const button = make("button", { type: "button", textContent: name, role: "radio", onclick: choose });
  button.dataset.name = name;
  return button;
}

function check(group, name) {
  for (const button of group.children) button.setAttribute("aria-checked", String(button.dataset.name === name));
}

const viewUrl = (file) => api.apiURL(`/view?${new URLSearchParams(file)}`);

async function fetchImage(file) {
  const answer = await fetch(viewUrl(file));
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return createImageBitmap(await answer.blob());
}

async function fetchPicks(file) {
  const answer = await fetch(viewUrl(file));
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  const data = await answer.json();
  for (const pick of data.picks) {
    pick.kept = pick.kept.map(unpack);
    pick.assignment = pick.assignment.map(unpack);
  }
  return data;
}

/** base64 of little-endian 32-bit integers */
function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Int32Array(bytes.buffer);
}
