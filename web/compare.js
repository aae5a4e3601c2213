// On the ToMACompare node: its sentence, below the picture that ComfyUI shows.
import { addElement, chain, make } from "./dom.js";

export function addSummary(node) {
  const text = make("div", { className: "toma toma-summary", textContent: "" });
  addElement(node, "summary", text, () => 44, () => 44);
  chain(node, "onExecuted", (output) => (text.textContent = output?.toma_summary?.[0] ?? ""));
}
