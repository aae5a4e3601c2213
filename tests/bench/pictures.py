"""Makes the pictures of the README, of the nodes' help and the thumbnails of the workflows.

    python dev.py bench pictures

Runs the demo workflow in a real page, with both demo models, and takes them from what the page shows:
web/docs/*.jpg, web/docs/<node>/picture.jpg, workflows/*.jpg and the demo's own thumbnail.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

from comfy_server import DEMO_PACK, ComfyServer
from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))
from canvas import READY, ROOT, Canvas

DOCS, WORKFLOWS = ROOT / "web" / "docs", ROOT / "workflows"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
STYLES = ("kept tokens", "regions", "density")
# Thumbnail of which workflow: from which model's run, in which style.
THUMBNAILS = {
    "flux": ("flux", "kept tokens"),
    "flux-kontext": ("flux", "regions"),
    "sdxl": ("sdxl-like unet", "kept tokens"),
    "sdxl-hires": ("sdxl-like unet", "regions"),
}
CAPTIONS = {"flux": "burger on teal", "sdxl-like unet": "strawberry on teal"}
THUMBNAIL = (400, 400)  # the cards of the Templates dialog are square


@contextmanager
def running():
    """The address of a server: the one in COMFYUI_URL, or one of our own."""
    if "COMFYUI_URL" in os.environ:
        yield os.environ["COMFYUI_URL"]
        return
    with tempfile.TemporaryDirectory() as base, ComfyServer(Path(base)) as server:
        yield server.url


def shot(canvas: Canvas, node: int) -> Image.Image:
    with Image.open(canvas.screenshot("picture", node, margin=10)) as picture:
        return picture.convert("RGB")


def save(picture: Image.Image, path: Path, widest: int) -> None:
    if picture.width > widest:
        picture = picture.resize((widest, round(picture.height * widest / picture.width)), Image.LANCZOS)
    picture.save(path, quality=86, optimize=True)
    print(path.relative_to(ROOT), picture.size, flush=True)


def beside(pictures: list[Image.Image], gap: int = 12) -> Image.Image:
    width = sum(p.width for p in pictures) + gap * (len(pictures) - 1)
    joined = Image.new("RGB", (width, max(p.height for p in pictures)), (20, 22, 26))
    x = 0
    for picture in pictures:
        joined.paste(picture, (x, 0))
        x += picture.width + gap
    return joined


def drawn(canvas: Canvas, node: int) -> Image.Image:
    """What the preview's own canvas shows, cut to the picture in it."""
    url = canvas.element(node, "picks").evaluate("(root) => root.querySelector('.toma-stage canvas').toDataURL()")
    picture = Image.open(io.BytesIO(b64decode(url.partition(",")[2])))
    return picture.crop(picture.getbbox()).convert("RGB")


def thumbnail(pictures: list[Image.Image], path: Path) -> None:
    """Pictures side by side on a dark ground, each as large as it can be."""
    ground = Image.new("RGB", THUMBNAIL, (20, 22, 26))
    wide, high = THUMBNAIL[0] // len(pictures), THUMBNAIL[1]
    for place, picture in enumerate(pictures):
        part = picture.copy()
        part = part.resize([round(s * min(wide / part.width, high / part.height)) for s in part.size])
        ground.paste(part, (place * wide + (wide - part.width) // 2, (high - part.height) // 2))
    save(ground, path, THUMBNAIL[0])


def run(canvas: Canvas, model: str) -> dict[str, int]:
    ids = canvas.drop(DEMO_PACK / "workflows" / "toma-demo.json")
    canvas.set_widget(ids["ToMADemoLoader"], "name", model)
    canvas.page.evaluate(
        """(caption) => app.graph.nodes.filter((n) => n.type === "ToMADemoPrompt" && n.widgets[0].value)
             .forEach((n) => { n.widgets[0].value = caption; })""",
        CAPTIONS[model],
    )
    # Drawn without a GPU, a large page takes the time of the model, whose seconds a step are in the picture.
    size = canvas.page.viewport_size
    canvas.page.set_viewport_size({"width": 320, "height": 200})
    error = canvas.run()
    canvas.page.set_viewport_size(size)
    if error:
        sys.exit(error)
    canvas.page.wait_for_timeout(1500)
    return ids


def take(canvas: Canvas, model: str) -> None:
    ids = run(canvas, model)
    canvas.frame(ids["ToMAPreview"])
    styles = {}
    for style in STYLES:
        canvas.set_widget(ids["ToMAPreview"], "style", style)
        canvas.page.wait_for_timeout(400)
        styles[style] = (drawn(canvas, ids["ToMAPreview"]), shot(canvas, ids["ToMAPreview"]))
    canvas.set_widget(ids["ToMAPreview"], "style", STYLES[0])
    for name, (of, style) in THUMBNAILS.items():
        if of == model:
            thumbnail([styles[style][0]], WORKFLOWS / f"{name}.jpg")
    if model != "flux":
        return
    save(beside([picture for _, picture in styles.values()]), DOCS / "ToMAPreview" / "picture.jpg", 1500)
    for node in ("ToMA", "ToMACompare"):
        canvas.frame(ids[node])
        save(shot(canvas, ids[node]), DOCS / node / "picture.jpg", 760)
    thumbnail([compared(canvas, ids["ToMACompare"])], WORKFLOWS / "compare.jpg")
    graph = whole_graph(canvas)
    save(graph, DOCS / "demo.jpg", 1600)
    thumbnail([graph], DEMO_PACK / "workflows" / "toma-demo.jpg")


def compared(canvas: Canvas, node: int) -> Image.Image:
    """The picture that ToMACompare puts out."""
    file, origin = canvas.page.evaluate("(id) => [app.nodeOutputs[id].images[0], location.origin]", node)
    answer = canvas.page.request.get(f"{origin}/view", params=file)
    return Image.open(io.BytesIO(answer.body())).convert("RGB")


def whole_graph(canvas: Canvas, margin: int = 16) -> Image.Image:
    """The page, cut to the nodes."""
    canvas.frame()
    boxes = [canvas.box(node) for node in canvas.page.evaluate("() => app.graph.nodes.map((n) => n.id)")]
    left, top = min(b["x"] for b in boxes) - margin, min(b["y"] for b in boxes) - margin
    right = max(b["x"] + b["width"] for b in boxes) + margin
    bottom = max(b["y"] + b["height"] for b in boxes) + margin
    with Image.open(canvas.screenshot("picture")) as page:
        scale = page.width / 1600
        return page.convert("RGB").crop([round(side * scale) for side in (left, top, right, bottom)])


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    with running() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", chromium), args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000}, device_scale_factor=2)
        page.goto(url)
        page.wait_for_function(READY, timeout=120_000)
        page.evaluate("() => app.extensionManager.setting.set('Comfy.Minimap.Visible', false)")
        canvas = Canvas(page)
        canvas.use_vue(True)
        for model in CAPTIONS:
            take(canvas, model)
        canvas.use_vue(False)
        page.evaluate("() => app.extensionManager.setting.set('Comfy.Minimap.Visible', true)")
        browser.close()


if __name__ == "__main__":
    main()
