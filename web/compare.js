// On the ToMACompare node: its sentence, below the picture that ComfyUI shows.
import { addElement, make, onOutput } from "./dom.js";

export function addSummary(node) {
  const text = make("div", { className: "toma toma-summary", textContent: "" });
  addElement(node, "summary", text, () => 44, () => 44);
  onOutput(node, "toma_summary", (sentence) => (text.textContent = sentence ?? ""));
}
