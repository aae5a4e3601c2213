"""ComfyUI's page as a user meets it: build a graph, drop a file, queue, look."""

from __future__ import annotations

import json
from pathlib import Path

from comfy_server import DEV

ROOT = Path(__file__).resolve().parents[2]
READY = "() => window.app?.extensionManager?.spinner === false"
SCREENSHOTS = DEV / "screenshots"

BUILD = """async ({nodes, links, groups}) => {
  const made = {};
  await app.loadGraphData({nodes: [], links: [], version: 0.4, last_node_id: 0, last_link_id: 0});
  for (const spec of nodes) {
    const node = LiteGraph.createNode(spec.type);
    if (!node) throw new Error(`no node type ${spec.type}`);
    node.pos = spec.pos ?? [0, 0];
    app.graph.add(node);
    node.pos = spec.pos ?? [0, 0];
    if (spec.title) node.title = spec.title;
    if (spec.colour) { node.color = spec.colour[0]; node.bgcolor = spec.colour[1]; }
    for (const [name, value] of Object.entries(spec.widgets ?? {})) {
      const widget = name ? node.widgets?.find((widget) => widget.name === name) : node.widgets[0];
      if (!widget) throw new Error(`${spec.type} has no widget ${name}`);
      widget.value = value;
      if (name === "preset") widget.callback?.(value);
    }
    Object.assign(node.properties, spec.properties ?? {});
    made[spec.id] = node;
  }
  for (const [from, output, to, input] of links) {
    const slot = made[to].inputs.findIndex((slot) => slot.name === input);
    if (slot < 0) throw new Error(`${to} has no input ${input}`);
    made[from].connect(output, made[to], slot);
  }
  await new Promise((done) => setTimeout(done, 300));
  for (const spec of nodes) {
    const least = made[spec.id].computeSize(), size = spec.size ?? least;
    made[spec.id].setSize([Math.max(size[0], least[0]), Math.max(size[1], least[1])]);
  }
  for (const spec of groups) {
    const group = new LiteGraph.LGraphGroup(spec.title);
    group.color = spec.colour;
    app.graph.add(group);
    group.resizeTo(spec.nodes.map((id) => made[id]), 16);
  }
  app.canvas.setDirty(true, true);
  return Object.fromEntries(Object.entries(made).map(([id, node]) => [id, node.id]));
}"""

QUEUE = """(press) => new Promise((resolve, reject) => {
  const api = app.api, undo = [];
  const on = (name, act) => {
    const listen = ({detail}) => { undo.forEach((off) => off()); act(detail); };
    api.addEventListener(name, listen);
    undo.push(() => api.removeEventListener(name, listen));
  };
  on("execution_success", () => resolve(null));
  on("execution_error", (e) => resolve(`${e.node_type}: ${e.exception_message}`));
  on("execution_interrupted", () => reject(new Error("interrupted")));
  setTimeout(() => reject(new Error("no end of the run in ten minutes")), 600_000); // a busy machine
  const button = document.querySelector('button[data-testid="queue-button"], [data-testid="queue-button"] button');
  if (press) button.click();
  else app.queuePrompt(0, 1).then((queued) => {
    // Some front ends say false of a prompt that they have queued: its events come all the same.
    if (queued === false) setTimeout(() => reject(new Error("not queued")), 90_000);
  });
})"""

EMPTY_SPOT = """() => {
  const {scale, offset} = app.canvas.ds, rect = app.canvas.canvas.getBoundingClientRect();
  const nodeAt = (x, y) =>
    app.graph.getNodeOnPos((x - rect.left) / scale - offset[0], (y - rect.top) / scale - offset[1], app.graph.nodes);
  for (const y of [500, 700, 300, 850, 600, 400, 930, 150])
    for (const x of [800, 1000, 600, 1200, 400, 1350, 200])
      if (document.elementFromPoint(x, y) === app.canvas.canvas && !nodeAt(x, y)) return [x, y]; // no panel, no toast
  return null; // not yet: something still lies over the canvas
}"""

PIXEL = """async () => {
  const canvas = new OffscreenCanvas(2, 2);
  canvas.getContext("2d").fillRect(0, 0, 2, 2);
  return Array.from(new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer()));
}"""


class Canvas:
    """One page. Node ids are those of the graph."""

    def __init__(self, page) -> None:
        self.page = page

    def build(self, nodes: list[dict], links: list[tuple], groups: list[dict] = ()) -> dict[str, int]:
        """Replaces the graph: nodes {id, type, pos, size, widgets, title}, links (id, output, id, input)."""
        return self.page.evaluate(BUILD, {"nodes": nodes, "links": links, "groups": list(groups)})

    def use_vue(self, on: bool) -> None:
        self.page.evaluate("(on) => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", on)
        self.page.wait_for_timeout(500)

    def use_theme(self, name: str) -> None:
        self.page.evaluate("(name) => app.extensionManager.setting.set('Comfy.ColorPalette', name)", name)
        self.page.wait_for_timeout(300)

    def run(self, press: bool = False) -> str | None:
        """Queues the graph and waits for its end; the error of a node, or None."""
        return self.page.evaluate(QUEUE, press)

    def widget(self, node: int, name: str):
        return self.page.evaluate(
            "([id, name]) => app.graph.getNodeById(id).widgets.find((w) => w.name === name)?.value",
            [node, name],
        )

    def set_widget(self, node: int, name: str, value) -> None:
        """As a user's choice: the value, then the widget's callback."""
        self.page.evaluate(
            """([id, name, value]) => {
              const widget = app.graph.getNodeById(id).widgets.find((w) => w.name === name);
              widget.value = value;
              widget.callback?.(value);
            }""",
            [node, name, value],
        )

    def widget_point(self, node: int, name: str, across: float) -> tuple[float, float]:
        """Where a classic widget is on the screen, at a share of its width from the right edge for small
        shares: its arrows, its slider."""
        return tuple(
            self.page.evaluate(
                """([id, name, across]) => {
                  const node = app.graph.getNodeById(id), {scale, offset} = app.canvas.ds;
                  const rect = app.canvas.canvas.getBoundingClientRect();
                  const widget = node.widgets.find((w) => w.name === name), y = widget.last_y ?? widget.y;
                  const width = widget.width ?? node.size[0];
                  const x = across < 0.1 ? width - 24 : 15 + across * (width - 30);
                  return [(node.pos[0] + x + offset[0]) * scale + rect.left,
                          (node.pos[1] + y + 10 + offset[1]) * scale + rect.top];
                }""",
                [node, name, across],
            )
        )

    def element(self, node: int, name: str):
        """The DOM element of a widget."""
        return self.page.evaluate_handle(
            "([id, name]) => app.graph.getNodeById(id).widgets.find((w) => w.name === name).element",
            [node, name],
        ).as_element()

    def frame(self, node: int | None = None, scale: float = 1.0) -> None:
        """Brings a node, or the whole graph, into view."""
        if node is None:
            self.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
            self.page.wait_for_timeout(600)
        else:
            self.page.evaluate(
                """([id, scale]) => {
                  const node = app.graph.getNodeById(id), ds = app.canvas.ds;
                  ds.scale = scale;
                  ds.offset[0] = 420 / scale - node.pos[0];
                  ds.offset[1] = 130 / scale - node.pos[1];
                  app.canvas.setDirty(true, true);
                }""",
                [node, scale],
            )
        self.page.wait_for_timeout(250)

    def box(self, node: int) -> dict:
        """Where a node is on the screen, with its title: x, y, width, height."""
        return self.page.evaluate(
            """(id) => {
              const node = app.graph.getNodeById(id), {scale, offset} = app.canvas.ds;
              const rect = app.canvas.canvas.getBoundingClientRect();
              const vue = document.querySelector(`[data-node-id="${id}"]`)?.getBoundingClientRect();
              if (vue) return {x: vue.x, y: vue.y, width: vue.width, height: vue.height};
              const [x, y, width, height] = node.getBounding();
              return {x: (x + offset[0]) * scale + rect.left, y: (y + offset[1]) * scale + rect.top,
                      width: width * scale, height: height * scale};
            }""",
            node,
        )

    def screenshot(self, name: str, node: int | None = None, margin: int = 16) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.mouse.move(800, 990)  # no tooltip in the picture
        self.page.wait_for_timeout(150)
        path = SCREENSHOTS / f"{name}.png"
        if node is None:
            self.page.screenshot(path=path)
            return path
        box = self.box(node)
        clip = {
            "x": max(0, box["x"] - margin), "y": max(0, box["y"] - margin),
            "width": box["width"] + 2 * margin, "height": box["height"] + 2 * margin,
        }  # fmt: skip
        self.page.screenshot(path=path, clip=clip)
        return path

    def drop(self, path: Path) -> dict[str, int]:
        """Drops a file on the canvas, through the browser's own drag and drop. The new ids by type: of
        several, the last."""
        from playwright.sync_api import TimeoutError as TookTooLong

        for lost in range(3):  # a page that is just restoring its last workflow may lose what falls on it
            try:
                self._drop(path)
                break
            except TookTooLong:
                self.screenshot("drop-lost")
                self.close_dialogs()
                if lost == 2:
                    raise
        self.page.wait_for_timeout(400)
        return self.page.evaluate("() => Object.fromEntries(app.graph.nodes.map((n) => [n.type, n.id]))")

    def _drop(self, path: Path) -> None:
        self.page.evaluate("() => { window.graphBefore = app.graph.nodes[0]; }")
        session = self.page.context.new_cdp_session(self.page)
        x, y = self.page.wait_for_function(
            EMPTY_SPOT, timeout=10_000
        ).json_value()  # some front ends give what falls on a node to the node
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})
        session.detach()
        self.page.wait_for_function(
            "() => app.graph.nodes.length && app.graph.nodes[0] !== window.graphBefore", timeout=10_000
        )

    def wait_for_nodes(self, count: int) -> None:
        self.page.wait_for_function("(count) => app.graph.nodes.length === count", arg=count, timeout=20_000)
        self.page.wait_for_timeout(300)

    def resize(self, node: int, grow: float = 0, to: list | None = None) -> list:
        """Makes a node larger or smaller, as far as it lets itself be; its size before."""
        return self.page.evaluate(
            """([id, grow, to]) => {
              const node = app.graph.getNodeById(id), before = [...node.size], least = node.computeSize();
              const size = to ?? [before[0] + grow, before[1] + grow];
              node.setSize([Math.max(size[0], least[0]), Math.max(size[1], least[1])]);
              app.canvas.setDirty(true, true);
              return before;
            }""",
            [node, grow, to],
        )

    def collapse(self, node: int, on: bool) -> None:
        self.page.evaluate(
            """([id, on]) => {
              const node = app.graph.getNodeById(id);
              if (Boolean(node.flags.collapsed) !== on) node.collapse();
            }""",
            [node, on],
        )
        self.page.wait_for_timeout(300)

    def missing(self) -> list[str]:
        """Node types of the graph that the server does not know."""
        return self.page.evaluate(
            "() => app.graph.nodes.map((n) => n.type).filter((t) => !LiteGraph.registered_node_types[t])"
        )

    def close_dialogs(self) -> None:
        self.page.keyboard.press("Escape")
        self.page.wait_for_timeout(150)


def read_workflow(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))
