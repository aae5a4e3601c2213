"""Writes workflows/ and the demo workflow as the front end saves them.

    python dev.py run tests/browser/build_workflows.py [NAME ...]

Each graph is built in the real page and serialized by it. Thumbnails: build_pictures.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from canvas import READY, ROOT, Canvas
from comfy_server import DEMO_PACK, ComfyServer
from playwright.sync_api import sync_playwright
from shipped import DEMO, WORKFLOWS

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SERIALIZE = """() => {
  const graph = app.graph.serialize();
  graph.id = crypto.randomUUID();
  graph.extra = {};
  return JSON.stringify(graph);  // as the page writes it: without what is undefined
}"""


def write(canvas: Canvas, name: str, build, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    canvas.build(*build())
    canvas.frame()
    canvas.page.wait_for_timeout(600)
    graph = json.loads(canvas.page.evaluate(SERIALIZE))
    old = folder / f"{name}.json"
    if old.exists():
        graph["id"] = json.loads(old.read_text(encoding="utf-8"))["id"]
    old.write_text(json.dumps(graph, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def running(base: str):
    """The address of a server: the one in COMFYUI_URL, or one of our own."""
    if "COMFYUI_URL" in os.environ:
        yield os.environ["COMFYUI_URL"]
        return
    with ComfyServer(Path(base)) as server:
        yield server.url


def main() -> None:
    chosen = sys.argv[1:]
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as base, running(base) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.goto(url)
        page.wait_for_function(READY, timeout=120_000)
        Canvas(page).use_vue(False)
        for table, folder in ((WORKFLOWS, ROOT / "workflows"), (DEMO, DEMO_PACK / "workflows")):
            for name, build in table.items():
                if not chosen or name in chosen:
                    write(Canvas(page), name, build, folder)
                    print(name, flush=True)
        browser.close()


if __name__ == "__main__":
    main()
