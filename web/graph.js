// What a node can know of its neighbours.
import { app } from "../../scripts/app.js";
import { widgetOf } from "./dom.js";

const MOST_STEPS = 10000; // a workflow file may say anything
const UNET = /xl\b|xl[_-]|sd[_ -]?1|sd[_ -]?2|v1-5|unet\b|pony|illustrious|noob/;
const DIT = /flux|chroma|kontext|qwen|z.?image|lumina|wan|hunyuan|ltx|sd[_ -]?3|hidream|cosmos|anima|krea|omnigen|aura|unetloader/;

/** "dit" or "unet" if the name or the file of the loader says so. */
export function familyOf(node) {
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
  if (UNET.test(words)) return "unet";
  return DIT.test(words) ? "dit" : null;
}

/** The nearest node down the line that has steps, as {name, steps}. */
export function findSampler(node) {
  let reach = [node];
  const seen = new Set(reach);
  for (let hops = 0; hops < 12 && reach.length; hops++) {
    const next = reach.flatMap((from) => (from.outputs ?? []).flatMap((_, slot) => from.getOutputNodes(slot) ?? []));
    reach = [...new Set(next)].filter((found) => !seen.has(found));
    for (const found of reach) {
      seen.add(found);
      const value = (name) => Number(widgetOf(found, name)?.value);
      const from = value("start_at_step") || 0, until = Math.min(value("steps"), value("end_at_step") || Infinity);
      const steps = Math.min(Math.trunc(until - from), MOST_STEPS);
      if (steps > 0) return { name: found.title || found.type, steps };
    }
  }
  return null;
}

/** The node of an execution id: "7", or "5:7" inside subgraph node 5. */
export function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph, node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}
