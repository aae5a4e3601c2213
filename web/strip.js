// On the ToMA node: the values of the preset, and the reuse schedule as a strip of bars.
import { addElement, chain, growToFit, make, widgetOf } from "./dom.js";
import { LEAVE, RESELECT, carries, scheduleOf, table } from "./schedule.js";
import { say } from "./text.js";

const CUSTOM = "custom", EXAMPLE_STEPS = 20, MOST_STEPS = 10000, MOST_BARS = 200;
const LEAST_WIDTH = 320, STRIP_HEIGHT = 120, LIVE_HEIGHT = 220;
const FAMILY_NAMES = { unet: "SDXL", flux: "Flux" };
const nodes = new Set();

/** Turns a new ToMA node into one that shows what it will do. presets: {name: {family: settings}} */
export function addStrip(node, presets) {
  const keys = Object.keys(Object.values(presets)[0].unet);
  const strip = buildStrip();
  const state = { node, presets, keys, strip, drawn: "" };
  strip.widget = addElement(node, "schedule", strip.root, () => strip.height(), () => strip.height());
  strip.onGrow = () => growToFit(node);
  node.setSize([Math.max(node.size[0], LEAST_WIDTH), node.computeSize()[1]]);
  watchWidgets(state);
  chain(node, "onConnectionsChange", (kind, slot, connected) => {
    // A value that comes by a link is meant to be used.
    if (kind === 1 && connected && keys.includes(node.inputs[slot]?.name)) set(node, "preset", CUSTOM);
  });
  chain(node, "onRemoved", () => nodes.delete(state));
  nodes.add(state);
  update(state);
  return strip;
}

// Steps and loaders may change in other nodes, in ways that no event tells of: look at them now and then.
setInterval(() => nodes.forEach(update), 250);

function watchWidgets(state) {
  const { node, keys } = state;
  for (const key of keys) {
    const widget = widgetOf(node, key);
    if (widget) chain(widget, "callback", () => {
      if (same(widget.value, shownPreset(state)?.[key])) return;
      set(node, "preset", CUSTOM);
      update(state);
    });
  }
  chain(widgetOf(node, "preset"), "callback", () => update(state));
}

const same = (a, b) => (typeof b === "number" ? Math.abs(a - b) < 1e-6 : a === b);

function shownPreset({ node, presets }) {
  return presets[widgetOf(node, "preset")?.value]?.[familyOf(node) ?? "unet"];
}

function set(node, name, value) {
  const widget = widgetOf(node, name);
  if (widget && !same(widget.value, value)) widget.value = value;
}

function update(state) {
  const { node, presets, keys, strip } = state;
  if (!node.graph) return;
  const preset = shownPreset(state);
  if (preset) keys.forEach((key) => set(node, key, preset[key]));
  const settings = Object.fromEntries(keys.map((key) => [key, widgetOf(node, key)?.value]));
  const sampler = findSampler(node), families = presets[widgetOf(node, "preset").value];
  const guessed = families && !familyOf(node) && JSON.stringify(families.unet) !== JSON.stringify(families.flux);
  const about = { settings, sampler, guessed, locale: say("reuse") };
  if (JSON.stringify(about) === state.drawn) return;
  state.drawn = JSON.stringify(about);
  strip.draw(about);
  node.setDirtyCanvas?.(true, false);
}

/** "flux" or "unet" if the name or the file of the loader says so. */
function familyOf(node) {
  let loader = node;
  for (let hops = 0; hops < 30; hops++) {
    const passesOn = loader.type === "Reroute"; // takes anything
    const slot = loader.inputs?.findIndex((input) => input.type === "MODEL" || passesOn);
    const next = slot >= 0 ? loader.getInputNode(slot) : null;
    if (!next) break;
    loader = next;
  }
  if (loader === node) return null;
  const words = [loader.type, ...(loader.widgets ?? []).map((widget) => widget.value)].join(" ").toLowerCase();
  if (/flux|chroma|kontext/.test(words)) return "flux";
  return /xl|sd[_ -]?1|v1-5|unet\b|pony|illustrious/.test(words) ? "unet" : null;
}

/** The nearest node down the line that has steps, as {name, steps}. */
function findSampler(node) {
  let reach = [node];
  const seen = new Set(reach);
  for (let hops = 0; hops < 12 && reach.length; hops++) {
    const next = reach.flatMap((from) => (from.outputs ?? []).flatMap((_, slot) => from.getOutputNodes(slot) ?? []));
    reach = [...new Set(next)].filter((found) => !seen.has(found));
    for (const found of reach) {
      seen.add(found);
      const value = (name) => Number(widgetOf(found, name)?.value);
      const from = value("start_at_step") || 0, until = Math.min(value("steps"), value("end_at_step") || Infinity);
      const steps = Math.min(Math.trunc(until - from), MOST_STEPS); // a workflow file may say anything
      if (steps > 0) return { name: found.title || found.type, steps };
    }
  }
  return null;
}

function buildStrip() {
  const bars = make("div", { className: "toma-bars", tabIndex: 0, role: "img" });
  const numbers = make("div", { className: "toma-numbers" });
  const legend = make("div", { className: "toma-legend" });
  const caption = make("div", { className: "toma-caption" });
  caption.setAttribute("aria-live", "polite");
  const root = make("div", { className: "toma toma-strip" }, bars, numbers, legend, caption);
  let labels = [], cursor = -1, rest = "";

  const point = (step) => {
    cursor = step;
    [...bars.children].forEach((bar, i) => bar.classList.toggle("toma-here", i === step));
    caption.textContent = labels[step] ?? rest;
  };
  const stepAt = (event) => {
    const box = bars.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left) / box.width) * labels.length);
  };
  bars.addEventListener("pointermove", (event) => point(stepAt(event)));
  bars.addEventListener("pointerleave", () => point(-1));
  bars.addEventListener("blur", () => point(-1));
  bars.addEventListener("keydown", (event) => {
    const last = labels.length - 1;
    const to = { ArrowRight: Math.min(last, cursor + 1), ArrowLeft: Math.max(0, cursor - 1), Home: 0, End: last, Escape: -1 };
    if (!(event.key in to)) return;
    event.preventDefault();
    point(to[event.key]);
  });

  return {
    root,
    live: null,
    height() {
      return STRIP_HEIGHT + (this.live ? LIVE_HEIGHT : 0);
    },
    /** Puts an element with the picks of the running sampler below the strip. */
    show(element) {
      if (this.live) return;
      this.live = element;
      root.append(element);
      this.onGrow();
    },
    draw({ settings, sampler, guessed }) {
      const steps = sampler?.steps ?? EXAMPLE_STEPS, shown = Math.min(steps, MOST_BARS);
      const merged = settings.ratio > 0, full = carries(settings);
      const actions = merged ? table(scheduleOf(settings), steps) : new Array(steps).fill(LEAVE);
      const kinds = actions.map((action) => (action === RESELECT && full ? "full" : action));
      bars.replaceChildren(...kinds.slice(0, shown).map((kind) => bar(kind, settings.ratio)));
      labels = kinds.slice(0, shown).map((kind, i) => say("step", { s: i + 1, n: steps, what: say(kind) }));
      numbers.replaceChildren(...stepNumbers(shown));
      legend.replaceChildren(...legendOf(kinds));
      const note = merged ? (guessed ? say("shownFor", { family: FAMILY_NAMES.unet }) : "") : say("off");
      const which = sampler ? say("stepsOf", { n: steps, sampler: sampler.name }) : say("stepsExample", { n: steps });
      rest = note ? `${which} · ${note}` : which;
      bars.title = say("height");
      bars.setAttribute("aria-label", `${rest}. ${[...legend.children].map((item) => item.textContent).join(", ")}`);
      root.dataset.actions = actions.join(" ");
      point(Math.min(cursor, labels.length - 1));
    },
  };
}

function bar(kind, ratio) {
  const element = make("div", { className: `toma-bar toma-${kind}` });
  const share = kind === "full" || kind === LEAVE ? 1 : 1 - ratio;
  element.style.height = `${Math.max(10, share * 100)}%`;
  return element;
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

function legendOf(kinds) {
  const order = ["full", "reselect", "reweight", "reuse", LEAVE];
  return order.filter((kind) => kinds.includes(kind)).map((kind) => {
    const swatch = make("i", { className: `toma-swatch toma-${kind}` });
    const count = kinds.filter((other) => other === kind).length;
    return make("span", {}, swatch, `${say(kind)} ${count}`);
  });
}
