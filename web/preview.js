// On the ToMAPreview node: look through all that was recorded, without running again.
import { addSnug, chain, fitCanvas, make, onOutput, widgetOf } from "./dom.js";
import { fetchImage, fetchRecord } from "./files.js";
import { drawDark, drawDensity, drawError, drawKept, drawRegions, drawScale, frameOf } from "./picks.js";
import { readRun } from "./runs.js";
import { reason, say } from "./text.js";

const DRAW = { "kept tokens": drawKept, regions: drawRegions, density: drawDensity };
const ERROR = "forecast error", MOST_BUTTONS = 6, EMPTY_HEIGHT = 84;

export function addPreview(node) {
  const view = buildView(node);
  const fit = addSnug(node, "picks", view.root, view.inner, EMPTY_HEIGHT);
  chain(node, "onResize", () => requestAnimationFrame(fit));
  for (const name of ["step", "blocks", "style", "frame"]) {
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
  const slider = make("input", { type: "range", min: 1, max: 1, step: 1, value: 1, className: "toma-step" });
  const groups = make("div", { className: "toma-switch", role: "radiogroup" });
  const buttons = make("div", { className: "toma-switch", role: "radiogroup" });
  const frames = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0, className: "toma-frames" });
  const which = make("span", { className: "toma-which" });
  const film = make("label", { className: "toma-batch" }, which, frames);
  const scale = make("canvas", { width: 128, height: 1, className: "toma-scale" });
  const least = make("span"), most = make("span");
  const legend = make("div", { className: "toma-legend" }, least, scale, most);
  const caption = make("div", { className: "toma-caption" });
  const remark = make("div", { className: "toma-caption toma-remark" });
  caption.setAttribute("aria-live", "polite");
  const controls = make("div", { className: "toma-controls" }, slider, groups, buttons, film);
  const inner = make("div", { className: "toma-inner" }, stage, controls, legend, caption, remark);
  const root = make("div", { className: "toma toma-preview" }, inner);
  let data = null, run = null, images = [], loads = 0, looked = 0;
  drawScale(scale);

  const value = (name) => widgetOf(node, name)?.value;
  const set = (name, to) => {
    const widget = widgetOf(node, name);
    if (widget) widget.value = to;
  };
  /** Which of the images that came is shown: that of the widget, or the nearest before it. */
  const shownImage = () => {
    const wanted = Number(value("frame")) || 0;
    if (wanted < 1) return looked;
    const at = data.images.findLastIndex((number) => number < wanted);
    return Math.min(Math.max(at, 0), images.length - 1);
  };
  const draw = () => {
    const recorded = Boolean(data && images.length && (data.picks.length || data.errors.length));
    controls.hidden = caption.hidden = !recorded;
    message.hidden = recorded;
    legend.hidden = remark.hidden = true;
    message.textContent = data ? data.message : say("noPicks");
    slider.setAttribute("aria-label", say("stepLabel"));
    groups.setAttribute("aria-label", say("blocksLabel"));
    buttons.setAttribute("aria-label", say("imageLabel"));
    frames.setAttribute("aria-label", say("imageLabel"));
    const shape = images[0];
    stage.style.aspectRatio = shape ? `${shape.width} / ${shape.height}` : "";
    if (recorded) drawRecord();
    else drawDark(canvas, images[0]);
  };
  const drawRecord = () => {
    const step = Math.min(Math.max(Number(value("step")) || run.steps, 1), run.steps);
    const at = shownImage(), image = images[at], style = value("style");
    slider.max = run.steps;
    slider.value = step;
    frames.value = at;
    check(buttons, String(data.images[at] + 1));
    which.textContent = say("frame", { f: data.images[at] + 1 });
    const asMap = data.errors.length && (style === ERROR || !data.picks.length);
    const told = asMap ? drawMap(step, at, image) : drawPick(step, at, image, style);
    caption.textContent = [whatItWas(run, step), ...told].filter(Boolean).join(" · ");
    remark.hidden = !data.reason;
    remark.textContent = data.reason ?? "";
  };
  const drawMap = (step, at, image) => {
    const found = atStep(data.errors, step - 1), [depth, rows, columns] = found.size;
    const [which, frame] = placeOf(data, at, found.error.length);
    const from = Math.min(frame, depth - 1) * rows * columns, bytes = found.error[which].subarray(from, from + rows * columns);
    drawError(canvas, image, { size: [rows, columns], bytes }, image.width / image.height);
    groups.hidden = true;
    legend.hidden = false;
    least.textContent = "0";
    most.textContent = `${Number((100 * found.most).toPrecision(2))} %`;
    root.dataset.map = String(found.step + 1);
    return [say("mapOf", { at: found.step + 1 })];
  };
  const drawPick = (step, at, image, style) => {
    const group = data.groups.includes(value("blocks")) ? value("blocks") : data.groups[0];
    const pick = atStep(data.picks.filter((one) => one.group === group), step - 1);
    groups.hidden = data.groups.length < 2;
    check(groups, group);
    const [which, frame] = placeOf(data, at, pick.kept.length);
    const whole = { grid: pick.grid, kept: pick.kept[which], assignment: pick.assignment[which] };
    const largest = (DRAW[style] ?? drawKept)(canvas, image, frameOf(whole, frame, data.frames), image.width / image.height);
    legend.hidden = style !== "density";
    least.textContent = "1";
    most.textContent = `${largest} ${say("density")}`;
    delete root.dataset.map;
    const k = whole.kept.length, total = pick.grid[0] * pick.grid[1], share = Math.round((100 * k) / total);
    const when = pick.step < step ? say("chosenAt", { at: pick.step + 1 }) : say("notYet");
    return [when, say("counted", { k, total, share }), style === ERROR ? say("noMap") : ""];
  };
  const buildControls = () => {
    const pick = (name) => () => (set("blocks", name), draw());
    groups.replaceChildren(...data.groups.map((name) => option(name, pick(name))));
    buttons.replaceChildren(...data.images.map((number, i) => option(String(number + 1), () => look(i))));
    buttons.hidden = images.length < 2 || images.length > MOST_BUTTONS;
    film.hidden = images.length <= MOST_BUTTONS;
    frames.max = images.length - 1;
  };
  const look = (i) => {
    looked = i;
    if (Number(value("frame"))) set("frame", data.images[i] + 1); // 0 goes on meaning all of them in the output
    draw();
  };
  slider.addEventListener("input", () => (set("step", Number(slider.value)), draw()));
  frames.addEventListener("input", () => look(Number(frames.value)));
  fitCanvas(canvas, draw);

  return {
    root,
    inner,
    draw,
    async load(output) {
      if (!output) return;
      const load = ++loads;
      try {
        const [recorded, loaded] = await Promise.all([fetchRecord(output.picks), Promise.all(output.images.map(fetchImage))]);
        if (load !== loads) return; // a newer one has overtaken it
        data = { ...recorded, images: loaded.map((_, i) => Number(recorded.images?.[i] ?? i)) };
        run = readRun({ ...recorded, run: "recorded" });
        images = loaded;
        looked = Math.min(looked, images.length - 1);
        buildControls();
      } catch (error) {
        data = { picks: [], errors: [], groups: [], message: String(error) };
      }
      draw();
    },
  };
}

/** What was found at a step (counted from 0): the last up to it, or the first that will be. */
const atStep = (found, step) => found.findLast((one) => one.step <= step) ?? found[0];

/** Of a shown image: which latent of the batch it is of, and which frame of that, as nodes/preview.py has it. */
function placeOf(data, at, batch) {
  const number = data.images[at], count = Math.max(...data.images) + 1;
  if (data.frames < 2) return [number % batch, 0];
  const each = Math.max(1, Math.floor(count / batch));
  const frame = Math.ceil(((number % each) * (data.frames - 1)) / Math.max(1, each - 1));
  return [Math.min(Math.floor(number / each), batch - 1), frame];
}

/** "step 3 of 20 · full: the reason" */
function whatItWas(run, step) {
  const found = run.evaluations.findLast((evaluated) => evaluated.step === step - 1);
  const what = found ? `${say(found.kind)}: ${reason(found.why)}` : "";
  return say("step", { s: step, n: run.steps, what }).replace(/ · $/, "");
}

function option(name, choose) {
  const button = make("button", { type: "button", textContent: name, role: "radio", onclick: choose });
  button.dataset.name = name;
  return button;
}

function check(group, name) {
  for (const button of group.children) button.setAttribute("aria-checked", String(button.dataset.name === name));
}
