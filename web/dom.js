// Small tools for DOM widgets that have to work in both node renderers.
import { app } from "../../scripts/app.js";

/** An element with properties, attributes in `data`, and children; text only ever as text. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const style = make("link", { rel: "stylesheet", href: new URL("./toma.css", import.meta.url).href });
document.head.append(style);

const MARGIN = 8;

/** Adds `element` to a node as a widget that is stored neither in the prompt nor in the workflow. */
export function addElement(node, name, element, minHeight, maxHeight) {
  // The canvas listens on the document: arrow keys and Delete in here are not for it.
  element.addEventListener("keydown", (event) => event.stopPropagation());
  element.addEventListener("pointerdown", (event) => event.stopPropagation());
  const widget = node.addDOMWidget(name, name, element, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => minHeight() + 2 * MARGIN,
    getMaxHeight: maxHeight && (() => maxHeight() + 2 * MARGIN),
  });
  widget.serialize = false;
  // The classic renderer notes a width of its own there at a click, and keeps it: ours is always the node's.
  Object.defineProperty(widget, "width", { get: () => undefined, set() {}, configurable: true });
  return widget;
}

/** Calls `after` with the arguments of `object[name]`, each time after it ran. */
export function chain(object, name, after) {
  const before = object[name];
  object[name] = function (...args) {
    const result = before?.apply(this, args);
    after.apply(this, args);
    return result;
  };
}

/**
 * Calls `use` with what the node put out under `key`: when it ran, and when its workflow is shown again, which
 * makes the node anew and restores its output some time later.
 */
export function onOutput(node, key, use) {
  let ran = false;
  chain(node, "onExecuted", (output) => {
    ran = true;
    use(output?.[key]?.[0]);
  });
  for (const wait of [100, 500, 1500]) {
    setTimeout(() => {
      const kept = app.nodeOutputs?.[node.id]?.[key]?.[0];
      if (!kept || ran || !node.graph) return;
      ran = true;
      use(kept);
    }, wait);
  }
}

/** Keeps a canvas as large as its box, in device pixels, and redraws it. */
export function fitCanvas(canvas, draw) {
  const fit = () => {
    const scale = Math.max(1, window.devicePixelRatio || 1);
    const width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
    if (!width || !height) return;
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    draw();
  };
  new ResizeObserver(fit).observe(canvas);
  return fit;
}

export const widgetOf = (node, name) => node.widgets?.find((widget) => widget.name === name);

/** Takes a widget out of sight in both renderers; its value is still saved with the workflow. */
export function hideWidget(widget) {
  if (!widget) return;
  widget.hidden = true;
  widget.options = { ...widget.options, hidden: true };
}

/**
 * Adds `root` as a widget that is as tall as `inner`, and keeps the node as tall as what it shows: none of its widgets
 * would use more room. Returns what makes it so again.
 */
export function addSnug(node, name, root, inner, guess) {
  let height = guess;
  const fit = () => {
    if (!node.graph || node.flags?.collapsed) return;
    // Vue nodes stretch the widget: what it has too much, the node has, too.
    const slack = LiteGraph.vueNodesMode ? Math.max(0, root.clientHeight - inner.offsetHeight) : 0;
    const needed = LiteGraph.vueNodesMode ? node.size[1] - slack : node.computeSize()[1];
    if (Math.abs(node.size[1] - needed) < 1) return;
    node.setSize([node.size[0], needed]);
    node.setDirtyCanvas?.(true, true);
  };
  addElement(node, name, root, () => height, () => height);
  new ResizeObserver(() => {
    if (!inner.offsetHeight || inner.offsetHeight === height) return; // not shown, or nothing new
    height = inner.offsetHeight;
    fit();
  }).observe(inner);
  return fit;
}
