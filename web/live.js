// The picks of the running sampler, on the ToMA node that makes them.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { fitCanvas, make } from "./dom.js";
import { nodeOf } from "./graph.js";
import { drawKept } from "./picks.js";
import { say } from "./text.js";

export const SETTING = "ToMA.LivePicks";
const views = new WeakMap();
let latent = null, told = null;

const wanted = () => app.extensionManager.setting.get(SETTING) !== false;

/** Tells the server that this page is there, and whether it wants to see picks. */
export async function tellServer(on = wanted()) {
  if (!api.clientId) return;
  told = api.clientId;
  const body = JSON.stringify({ client_id: api.clientId, on });
  const sent = { method: "POST", body, headers: { "Content-Type": "application/json" } };
  // A server that is away forgets its pages: they tell it again when it is back.
  await api.fetchApi("/toma/live", sent).catch((error) => console.warn(`ToMA: no live picks, ${error}`));
}

export function watchPicks() {
  tellServer();
  // The server names the page when it connects, and forgets it when it restarts.
  api.addEventListener("status", () => api.clientId !== told && tellServer());
  api.addEventListener("reconnected", () => tellServer());
  api.addEventListener("execution_start", () => (latent = null));
  api.addEventListener("b_preview_with_metadata", ({ detail }) => keepLatent(detail.blob));
  api.addEventListener("b_preview", ({ detail }) => keepLatent(detail));
  api.addEventListener("toma.picks", ({ detail }) => wanted() && receive(detail));
}

async function keepLatent(blob) {
  latent = await createImageBitmap(blob).catch(() => null);
}

/** Only the newest pick is drawn: what came while the page was busy is dropped. */
function receive(pick) {
  const node = nodeOf(pick.node);
  if (!node?.tomaStrip) return;
  const view = views.get(node) ?? newView(node);
  const waiting = view.pick !== view.drawn;
  view.pick = pick;
  if (!waiting) requestAnimationFrame(() => view.draw());
}

function newView(node) {
  const canvas = make("canvas"), caption = make("div", { className: "toma-caption" });
  const root = make("div", { className: "toma-live" }, make("div", { className: "toma-stage" }, canvas), caption);
  const view = {
    pick: null,
    drawn: null,
    draw() {
      view.drawn = view.pick;
      if (!canvas.clientWidth) return;
      drawKept(canvas, latent, view.pick);
      const [rows, columns] = view.pick.grid;
      const fields = { s: view.pick.step + 1, group: view.pick.group, k: view.pick.kept.length, total: rows * columns };
      caption.textContent = say("live", fields);
    },
  };
  views.set(node, view);
  fitCanvas(canvas, () => view.pick && view.draw());
  node.tomaStrip.bars.inner.append(root);
  // When the run is over the strip tells of it, and the room is given back.
  node.tomaStrip.onEnd = () => (root.remove(), views.delete(node));
  return view;
}
