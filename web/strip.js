// On the ToMA node: the values of the preset, and a strip of its steps: planned, under way, done.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { buildBars, happened, planned } from "./bars.js";
import { addSnug, chain, hideWidget, make, widgetOf } from "./dom.js";
import { familyOf, findSampler, nodeOf } from "./graph.js";
import { planOf } from "./plan.js";
import { Current, KEPT_AS, readRun, stored } from "./runs.js";
import { say } from "./text.js";

const CUSTOM = "custom", EXAMPLE_STEPS = 20, LEAST_WIDTH = 320, PLAN_HEIGHT = 104;
const FAMILY_NAMES = { unet: "SDXL", dit: "Flux" };
const OFF = [2, 4]; // modes of a node: never, bypass
const nodes = new Set();

/** Turns a new ToMA node into one that shows what it will do and what it did. presets: {name: {family: settings}} */
export function addStrip(node, presets, patience) {
  const keys = Object.keys(Object.values(presets)[0].unet), bars = buildBars();
  const root = make("div", { className: "toma toma-strip" }, bars.inner);
  const state = { node, presets, patience, keys, bars, current: new Current(), drawn: "", unsampled: false };
  hideWidget(widgetOf(node, "carry_detail"));
  state.fit = addSnug(node, "schedule", root, bars.inner, PLAN_HEIGHT);
  node.setSize([Math.max(node.size[0], LEAST_WIDTH), node.computeSize()[1]]);
  watchWidgets(state);
  chain(node, "onConnectionsChange", (kind, slot, connected) => {
    // A value that comes by a link is meant to be used.
    if (kind === 1 && connected && keys.includes(node.inputs[slot]?.name)) set(node, "preset", CUSTOM);
  });
  chain(node, "onRemoved", () => nodes.delete(state));
  nodes.add(state);
  update(state);
  return state;
}

export function watchRuns() {
  api.addEventListener("toma.run", ({ detail }) => {
    const state = nodeOf(detail?.node)?.tomaStrip, before = state?.current.run;
    const run = state?.current.take(detail);
    if (!run) return;
    state.unsampled = false;
    run.asked = before?.run === run.run ? before.asked : (findSampler(state.node)?.steps ?? null);
    if (run.over) {
      state.node.properties[KEPT_AS] = stored(run);
      state.onEnd?.();
    }
    update(state);
    if (run.over) keepState();
  });
  // The prompt is over, and no sampler has used the model of this node: what an earlier run did is not what happened.
  api.addEventListener("toma.unsampled", ({ detail }) => {
    const state = nodeOf(detail?.node)?.tomaStrip;
    if (!state) return;
    state.unsampled = true;
    state.current.run = null;
    delete state.node.properties[KEPT_AS];
    update(state);
  });
  api.addEventListener("execution_start", () => nodes.forEach((state) => (state.unsampled = false)));
  // A server that was away does not know of its runs any more.
  api.addEventListener("reconnected", () => nodes.forEach(({ current }) => current.run?.over || (current.run = null)));
}

/** A page that reloads restores what its change tracker saw last, and that does not watch runs. */
function keepState() {
  const tracker = app.extensionManager.workflow?.activeWorkflow?.changeTracker;
  (tracker?.captureCanvasState ?? tracker?.checkState)?.call(tracker); // the latter in older front ends
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

const family = (state) => familyOf(state.node) ?? state.ranAs ?? null;

function shownPreset(state) {
  const families = state.presets[widgetOf(state.node, "preset")?.value];
  return families && Object.hasOwn(families, "unet") ? families[family(state) ?? "unet"] : undefined;
}

function set(node, name, value) {
  const widget = widgetOf(node, name);
  if (widget && !same(widget.value, value)) widget.value = value;
}

/** The last run, if the node would do the same again: with other settings or steps the plan is shown. */
function lastRun(state, settings, sampler) {
  const { node, presets, keys, current } = state;
  const kept = node.properties?.[KEPT_AS];
  if (kept !== state.keptBefore) {
    state.keptBefore = kept; // a workflow was loaded, or undone
    if (!current.run || current.run.over) current.run = kept ? readRun(kept) : null;
  }
  const run = current.run;
  if (!run || (sampler && run.asked !== null && run.asked !== sampler.steps)) return null;
  const agrees = (values) => keys.every((key) => isLinked(node, key) || same(run.settings[key], values[key]));
  if (agrees(settings)) return run;
  // The page may take the model for one of another family than it is.
  const families = presets[widgetOf(node, "preset")?.value] ?? {};
  state.ranAs = Object.keys(families).find((name) => agrees(families[name])) ?? state.ranAs;
  return state.ranAs && families[state.ranAs] && agrees(families[state.ranAs]) ? run : null;
}

const isLinked = (node, name) => node.inputs?.some((input) => input.name === name && input.link != null);

function update(state) {
  const { node, presets, keys, bars } = state;
  if (!node.graph) return;
  const preset = shownPreset(state);
  if (preset) keys.forEach((key) => set(node, key, preset[key]));
  const settings = Object.fromEntries(keys.map((key) => [key, widgetOf(node, key)?.value]));
  const sampler = findSampler(node), families = presets[widgetOf(node, "preset").value];
  const guessed = families && !family(state) && JSON.stringify(families.unet) !== JSON.stringify(families.dit);
  const off = OFF.includes(node.mode), run = off ? null : lastRun(state, settings, sampler);
  const about = [settings, sampler, guessed, run && [run.run, run.over, run.evaluations], family(state), say("full"), state.unsampled, off];
  state.fit();
  if (JSON.stringify(about) === state.drawn) return;
  state.drawn = JSON.stringify(about);
  const steps = run?.steps ?? sampler?.steps ?? EXAMPLE_STEPS;
  const plan = planned(planOf(settings, steps, family(state), state.patience), settings);
  if (run) {
    const { columns, legend } = happened(run, plan.columns.map(([bar]) => bar));
    bars.draw(run.over ? "done" : "running", columns, legend, lineOf(run));
  } else {
    const caption = off ? say("bypassed") : state.unsampled ? say("unsampled") : captionOf(settings, sampler, guessed, plan);
    bars.draw("plan", plan.columns, plan.legend, caption);
  }
  bars.warn(!run && !off && state.unsampled);
  bars.inner.classList.toggle("toma-off", off);
  node.setDirtyCanvas?.(true, false);
}

function lineOf(run) {
  if (!run.over) return say("running", { s: (run.evaluations.at(-1)?.step ?? 0) + 1, n: run.steps });
  return [run.summary, run.finished ? "" : say("endedEarly"), ...run.notes].filter(Boolean).join(" · ");
}

function captionOf(settings, sampler, guessed, plan) {
  const n = sampler?.steps ?? EXAMPLE_STEPS;
  const percent = Number((100 * settings.tolerance).toPrecision(2));
  return [
    sampler ? say("stepsOf", { n, sampler: sampler.name }) : say("stepsExample", { n }),
    willing(settings, plan, percent),
    guessed ? say("shownFor", { family: FAMILY_NAMES.unet }) : "",
  ].filter(Boolean).join(" · ");
}

/** What of the settings a plan can hold. */
function willing(settings, plan, percent) {
  if (settings.tolerance > 0) return plan.columns.some(([bar]) => bar.ghost) ? say("budget", { x: percent }) : say("tooFew");
  return settings.ratio > 0 ? "" : say("off");
}
