// ComfyUI-ToMA in the page: what the nodes show. Each part is in a file of its own.
import { app } from "../../scripts/app.js";
import { addWipe } from "./compare.js";
import { widgetOf } from "./dom.js";
import { SETTING, tellServer, watchPicks } from "./live.js";
import { addPreview } from "./preview.js";
import { addStrip, watchRuns } from "./strip.js";

let presets = null, patience = 0;

app.registerExtension({
  name: "ToMA",
  settings: [
    {
      id: SETTING,
      category: ["ToMA", "Live", "LivePicks"],
      name: "Show the kept tokens on the ToMA node while sampling",
      tooltip: "At most four times a second. Off: they are not sent.",
      type: "boolean",
      defaultValue: true,
      onChange: (on) => tellServer(on), // told before the setting is stored
    },
  ],
  setup() {
    watchPicks();
    watchRuns();
  },
  beforeRegisterNodeDef(_, nodeData) {
    // The table of toma_core/settings.py travels with the node's definition.
    if (nodeData.name === "ToMA") ({ presets, patience } = nodeData.input.required.preset[1]);
  },
  nodeCreated(node) {
    if (node.comfyClass === "ToMA" && presets) {
      node.tomaStrip = addStrip(node, presets, patience);
      widgetOf(node, "tolerance").options.precision = 3; // the arrows move by hundredths, finer values are typed
    }
    if (node.comfyClass === "ToMAPreview") addPreview(node);
    if (node.comfyClass === "ToMACompare") addWipe(node);
  },
});
