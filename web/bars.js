// The strip itself: a column for each step, a bar for each evaluation, a curve of grades below.
import { make } from "./dom.js";
import { FORECAST, FULL, KINDS, MERGED } from "./plan.js";
import { reason, say } from "./text.js";

const MOST_COLUMNS = 200, SLIVER = 0.12; // the height of a forecast, which computes nothing
const SVG = "http://www.w3.org/2000/svg";

export function buildBars() {
  const bars = make("div", { className: "toma-bars", tabIndex: 0, role: "img" });
  const grades = make("div", { className: "toma-grades" });
  const numbers = make("div", { className: "toma-numbers" });
  const legend = make("div", { className: "toma-legend" });
  const caption = make("div", { className: "toma-caption" });
  caption.setAttribute("aria-live", "polite");
  const inner = make("div", { className: "toma-inner" }, bars, grades, numbers, legend, caption);
  let entries = [], cursor = -1, rest = "";

  const point = (at) => {
    cursor = at;
    entries.forEach(({ element }, i) => element.classList.toggle("toma-here", i === at));
    caption.textContent = entries[at]?.label ?? rest;
    caption.classList.toggle("toma-quiet", at < 0 && inner.dataset.state !== "done");
    caption.classList.toggle("toma-pointed", at >= 0); // the node must not grow under the mouse
  };
  bars.addEventListener("pointermove", (event) => point(entryAt(bars, entries, event)));
  bars.addEventListener("pointerleave", () => point(-1));
  bars.addEventListener("blur", () => point(-1));
  bars.addEventListener("keydown", (event) => {
    const last = entries.length - 1;
    const to = { ArrowRight: Math.min(last, cursor + 1), ArrowLeft: Math.max(0, cursor - 1), Home: 0, End: last, Escape: -1 };
    if (!(event.key in to)) return;
    event.preventDefault();
    point(to[event.key]);
  });

  /** state: "plan", "running" or "done"; columns: of each step, its bars as {kind, share, label, ghost, or, off} */
  const draw = (state, columns, legendOf, line) => {
    const shown = columns.slice(0, MOST_COLUMNS);
    entries = [];
    bars.replaceChildren(...shown.map((column, step) => columnOf(column, step, entries)));
    inner.dataset.state = state;
    inner.dataset.kinds = shown.flat().map((bar) => bar.kind).join(" ");
    drawGrades(grades, shown);
    numbers.replaceChildren(...stepNumbers(shown.length));
    legend.replaceChildren(...legendOf.map(([kind, count, isNone]) => legendItem(kind, count, isNone)));
    rest = line;
    bars.title = say("height");
    bars.setAttribute("aria-label", `${rest}. ${[...legend.children].map((item) => item.textContent).join(", ")}`);
    point(Math.min(cursor, entries.length - 1));
  };
  /** Marks the line below the strip as one that should be read. */
  const warn = (on) => caption.classList.toggle("toma-warns", Boolean(on));
  return { inner, draw, warn };
}

function entryAt(bars, entries, { clientX }) {
  const box = bars.getBoundingClientRect(), columns = bars.children.length;
  const step = Math.floor(((clientX - box.left) / box.width) * columns);
  const inside = entries.map((entry, i) => [entry, i]).filter(([entry]) => entry.step === step);
  if (!inside.length) return -1;
  const across = ((clientX - box.left) / box.width) * columns - step;
  return inside[Math.min(inside.length - 1, Math.floor(across * inside.length))][1];
}

function columnOf(column, step, entries) {
  const elements = column.map((bar) => {
    const element = make("div", { className: `toma-bar toma-${bar.kind}` });
    element.style.height = `${100 * (bar.kind === FORECAST ? SLIVER : Math.max(SLIVER, bar.share))}%`;
    const box = make("div", { className: "toma-cell" }, element);
    if (bar.ghost) box.classList.add("toma-ghost");
    if (bar.now) box.classList.add("toma-now");
    for (const kind of bar.or ?? []) {
      const other = make("div", { className: `toma-maybe toma-${kind}` });
      other.style.height = `${100 * (kind === FULL ? 1 : bar.share)}%`;
      box.prepend(other);
    }
    if (!bar.blank) entries.push({ element: box, step, label: bar.label });
    return box;
  });
  return make("div", { className: "toma-column" }, ...elements);
}

/** 0..1 of a grade, logarithmic: a hundredth of the tolerance at the bottom, the tolerance in the middle. */
const height = (off) => Math.min(Math.max(0.5 + Math.log10(off) / 4, 0), 1);

function drawGrades(lane, columns) {
  const points = columns.flatMap((column, step) =>
    column.flatMap((bar, i) => {
      if (bar.off === null || bar.off === undefined) return [];
      return [{ x: (100 * (step + (i + 0.5) / column.length)) / columns.length, y: 100 * (1 - height(bar.off)), off: bar.off }];
    }));
  lane.hidden = !points.length;
  lane.title = say("grades");
  if (!points.length) return;
  const svg = document.createElementNS(SVG, "svg"), curve = document.createElementNS(SVG, "polyline");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  curve.setAttribute("points", points.map(({ x, y }) => `${x.toFixed(2)},${y.toFixed(2)}`).join(" "));
  svg.append(curve);
  const dots = points.map(({ x, y, off }) => {
    const dot = make("i", { className: off > 1 ? "toma-dot toma-over" : "toma-dot" });
    dot.dataset.off = String(off);
    dot.style.left = `${x}%`;
    dot.style.top = `${y}%`;
    return dot;
  });
  lane.replaceChildren(make("span", { className: "toma-line", textContent: say("tolerance") }), svg, ...dots);
}

/** The numbers of the first and of some round steps, each under its bar. */
function stepNumbers(steps) {
  const every = [1, 2, 5, 10, 20, 50].find((distance) => steps / distance <= 10) ?? 100;
  const numbers = [1];
  for (let step = every; step <= steps; step += every) if (step > 1) numbers.push(step);
  return numbers.map((step) => {
    const element = make("span", { textContent: String(step) });
    // Centred under its bar, but never beyond the strip's end.
    element.style.left = `min(${((step - 0.5) / steps) * 100}%, 100% - ${String(step).length * 3.2}px)`;
    return element;
  });
}

function legendItem(kind, count, isNone) {
  const item = make("span", {}, make("i", { className: `toma-swatch toma-${kind}` }), `${say(kind)} ${count}`);
  if (isNone) item.className = "toma-none";
  return item;
}

// ------------------------------------------------------------------ what is drawn before, during and after a run

/** The columns and the legend of a plan. */
export function planned(plan, settings) {
  const merged = 1 - settings.ratio, steps = plan.length;
  const columns = plan.map(({ kind, why, or }, step) => {
    const what = or ? say(or.includes(MERGED) ? "ifAllowedOrMerged" : "ifAllowed") : `${say(kind)}: ${say(why)}`;
    const label = say("step", { s: step + 1, n: steps, what });
    const share = kind === FULL ? 1 : merged;
    return [{ kind, share, or, label, ghost: Boolean(or) }];
  });
  const open = plan.filter(({ or }) => or), sure = (kind) => plan.filter((p) => !p.or && p.kind === kind).length;
  const legend = KINDS.map((kind) => {
    const most = kind === FORECAST ? open.length : open.filter(({ or }) => or.includes(kind)).length;
    if (!most) return [kind, String(sure(kind)), !sure(kind)];
    return [kind, kind === FULL ? say("atLeast", { n: sure(kind) }) : say("upTo", { n: most }), false];
  });
  return { columns, legend };
}

/** The columns and the legend of a run; of the steps that it has not come to, those of the plan. */
export function happened(run, plan) {
  const columns = Array.from({ length: run.steps }, () => []);
  run.evaluations.forEach(({ step, kind, why, off, work }, i) => {
    const now = !run.over && i === run.evaluations.length - 1;
    const grade = off === null || kind === FORECAST ? "" : ` · ${say("wasOff", { x: Number(off.toPrecision(2)) })}`;
    const label = say("step", { s: step + 1, n: run.steps, what: `${say(kind)}: ${reason(why)}${grade}` });
    // What a step costs that is under way is not known yet: drawn as it was planned.
    const share = kind === FULL ? 1 : now ? 1 - run.settings.ratio : work;
    columns[step].push({ kind, share, off: kind === FORECAST ? null : off, label, now });
  });
  const come = columns.findLastIndex((column) => column.length);
  columns.forEach((column, step) => {
    if (!column.length && step > come && !run.over && plan[step]) column.push(plan[step]);
    else if (!column.length) column.push({ kind: "blank", share: 0, blank: true });
  });
  const legend = KINDS.map((kind) => {
    const count = run.evaluations.filter((evaluated) => evaluated.kind === kind).length;
    return [kind, String(count), !count];
  });
  return { columns, legend };
}
