"""Makes the images of the nodes' help and the thumbnails of the workflows.

    python dev.py run tests/browser/build_pictures.py

Runs the demo workflow in a real page and takes them from what it shows: web/docs/<node>/picture.jpg, workflows/*.jpg
and the demo's own thumbnail.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from base64 import b64decode
from pathlib import Path

from build_workflows import FLAGS, running
from canvas import READY, ROOT, Canvas
from comfy_server import DEMO_PACK
from PIL import Image
from playwright.sync_api import sync_playwright

DOCS, WORKFLOWS = ROOT / "web" / "docs", ROOT / "workflows"
DEMO = DEMO_PACK / "workflows" / "toma-demo.json"
# Thumbnail of which workflow: from which model's run, of which kind, in which style, of which caption.
RUNS = {"flux": "burger on teal", "sdxl-like unet": "strawberry on teal"}
THUMBNAILS = {
    "flux": ("flux", "forecast", "forecast error"),
    "flux-kontext": ("flux", "merged", "regions"),
    "z-image-turbo": ("flux", "merged", "kept tokens"),
    "qwen-image": ("flux", "merged", "density"),
    "sdxl": ("sdxl-like unet", "forecast", "forecast error"),
    "sdxl-hires": ("sdxl-like unet", "merged", "regions"),
    "wan-video": ("sdxl-like unet", "forecast", "forecast error"),
}
SIDE = 400  # the cards of the Templates dialog are square
HIDE_PANELS = """async () => {
  for (const [id, value] of [["Comfy.Minimap.Visible", false], ["Comfy.RightSidePanel.IsOpen", false]])
    await app.extensionManager.setting.set(id, value);
}"""
UPPER_LEFT = "() => app.graph.nodes.reduce((a, b) => (a.pos[0] + a.pos[1] <= b.pos[0] + b.pos[1] ? a : b)).id"
BY_TITLE = "() => app.graph.nodes.map((n) => [n.id, n.type, n.title, n.pos[0]])"


def nodes_of(canvas: Canvas) -> dict[tuple[str, str], int]:
    """The demo's nodes by type and run, from left to right: plain, forecast, merged."""
    found = canvas.page.evaluate(BY_TITLE)
    rows = {}
    for kind in ("ToMA", "ToMAPreview", "ToMACompare", "KSampler"):
        ids = [number for number, type_, _, x in sorted(found, key=lambda one: one[3]) if type_ == kind]
        names = ("plain", "forecast", "merged")[-len(ids) :]
        rows.update({(kind, name): number for name, number in zip(names, ids)})
    return rows


def shot(canvas: Canvas, node: int) -> Image.Image:
    canvas.frame(node)
    with Image.open(canvas.screenshot("picture", node, margin=10)) as image:
        return image.convert("RGB")


def drawn(canvas: Canvas, node: int) -> Image.Image:
    """What the preview's own canvas shows, cut to the image in it."""
    url = canvas.element(node, "picks").evaluate("(root) => root.querySelector('.toma-stage canvas').toDataURL()")
    image = Image.open(io.BytesIO(b64decode(url.partition(",")[2])))
    return image.crop(image.getbbox()).convert("RGB")


def beside(images: list[Image.Image], gap: int = 12) -> Image.Image:
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    joined, x = Image.new("RGB", (width, max(image.height for image in images)), (20, 22, 26)), 0
    for image in images:
        joined.paste(image, (x, 0))
        x += image.width + gap
    return joined


def save(image: Image.Image, path: Path, widest: int = 960) -> None:
    if image.width > widest:
        image = image.resize((widest, round(image.height * widest / image.width)), Image.LANCZOS)
    image.save(path, quality=86, optimize=True)
    print(path.relative_to(ROOT), image.size, flush=True)


def square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.LANCZOS)


def help_images(canvas: Canvas, ids: dict) -> None:
    previews = [shot(canvas, ids["ToMAPreview", row]) for row in ("forecast", "merged")]
    save(beside([shot(canvas, ids["ToMA", row]) for row in ("forecast", "merged")]), DOCS / "ToMA" / "picture.jpg")
    save(beside(previews), DOCS / "ToMAPreview" / "picture.jpg")
    compared = shot(canvas, ids["ToMACompare", "merged"])
    save(compared, DOCS / "ToMACompare" / "picture.jpg")
    canvas.frame(ids["ToMACompare", "merged"], 1.5)
    wiped = canvas.element(ids["ToMACompare", "merged"], "summary").query_selector(".toma-wiped").screenshot()
    for path in (WORKFLOWS / "compare.jpg", DEMO.with_suffix(".jpg")):
        save(square(Image.open(io.BytesIO(wiped)).convert("RGB")), path)


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as base, running(base) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.goto(url)
        page.wait_for_function(READY, timeout=120_000)
        canvas = Canvas(page)
        canvas.use_vue(False)
        for model, caption in RUNS.items():
            canvas.build([], [])  # what falls on a node is not loaded
            loader = canvas.drop(DEMO)["ToMADemoLoader"]
            canvas.set_widget(loader, "name", model)
            prompts = page.evaluate("() => app.graph.nodes.filter((n) => n.type === 'ToMADemoPrompt').map((n) => n.id)")
            canvas.set_widget(min(prompts), "caption", caption)
            page.request.post(f"{url}/free", data={"free_memory": True, "unload_models": True})  # no run from the cache
            page.wait_for_timeout(1500)
            error = canvas.run()
            assert error is None, error
            page.wait_for_timeout(4000)
            ids = nodes_of(canvas)
            if model == "flux":
                help_images(canvas, ids)
            for name, (_, row, style) in ((n, t) for n, t in THUMBNAILS.items() if t[0] == model):
                canvas.set_widget(ids["ToMAPreview", row], "style", style)
                canvas.frame(ids["ToMAPreview", row])
                page.wait_for_timeout(300)
                save(square(drawn(canvas, ids["ToMAPreview", row])), WORKFLOWS / f"{name}.jpg")
        browser.close()


if __name__ == "__main__":
    main()
