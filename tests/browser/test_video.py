"""The heat map of a video: its frame is chosen by the slider, by the keyboard, and by the widget."""

from base64 import b64encode

import pytest
from canvas import PIXEL

FRAMES, IMAGES, SIDE = 3, 9, 4  # latent frames, decoded to 1 + 4 + 4 images


def error_map() -> str:
    """Frame t is wrong in row t."""
    cells = bytearray(FRAMES * SIDE * SIDE)
    for frame in range(FRAMES):
        start = (frame * SIDE + frame) * SIDE
        cells[start : start + SIDE] = b"\xff" * SIDE
    return b64encode(cells).decode()


FILM = {
    "steps": 2, "evaluations": [[0, "full", "first", None, 1], [1, "full", "near the end of the run", 0.5, 1]],
    "frames": FRAMES, "groups": [], "message": "", "reason": "No tokens were merged: ratio is 0 in these settings.",
    "picks": [], "images": list(range(IMAGES)),
    "errors": [{"step": 1, "size": [FRAMES, SIDE, SIDE], "most": 0.25, "error": [error_map()]}],
}  # fmt: skip
BRIGHT = """(root) => {
  const canvas = root.querySelector(".toma-stage canvas"), side = Math.min(canvas.width, canvas.height);
  const x = canvas.width / 2, top = (canvas.height - side) / 2, context = canvas.getContext("2d");
  return [0, 1, 2, 3].filter((row) => {
    const [r, g, b] = context.getImageData(x, top + ((row + 0.5) * side) / 4, 1, 1).data;
    return r > 200 && g > 200 && b < 90;
  });
}"""


@pytest.fixture
def film(canvas):
    page = canvas.page
    picture = bytes(page.evaluate(PIXEL))
    page.route("**/view?*film.json*", lambda route: route.fulfill(json=FILM))
    page.route("**/view?*film.png*", lambda route: route.fulfill(body=picture, content_type="image/png"))
    node = canvas.build([{"id": "look", "type": "ToMAPreview", "pos": [0, 0], "size": [400, 560]}], [])["look"]
    canvas.frame(node)
    page.evaluate(
        """([id, count]) => app.graph.getNodeById(id).onExecuted({toma: [
          {images: Array.from({length: count}, () => ({filename: "film.png"})), picks: {filename: "film.json"}}]})""",
        [node, IMAGES],
    )
    shown = "(id) => app.graph.getNodeById(id).widgets.find((w) => w.name === 'picks').element.dataset.map === '2'"
    page.wait_for_function(shown, arg=node, timeout=20_000)
    yield node
    page.unroute("**/view?*film.json*")
    page.unroute("**/view?*film.png*")
    canvas.build([], [])


def test_frames_of_a_video_are_chosen(canvas, renderer, film):
    root, page = canvas.element(film, "picks"), canvas.page
    assert root.evaluate(BRIGHT) == [0] and "frame 1" in root.inner_text()
    root.query_selector(".toma-frames").focus()
    seen = []
    for _ in range(IMAGES - 1):
        page.keyboard.press("ArrowRight")
        seen.append(root.evaluate(BRIGHT))
    assert seen == [[1]] * 4 + [[2]] * 4 and f"frame {IMAGES}" in root.inner_text()
    assert canvas.widget(film, "frame") == 0, "the output goes on drawing all frames"
    canvas.set_widget(film, "frame", 3)
    assert root.evaluate(BRIGHT) == [1] and "frame 3" in root.inner_text()
    page.keyboard.press("Home")
    assert root.evaluate(BRIGHT) == [0] and canvas.widget(film, "frame") == 1
    assert "25 %" in root.inner_text() and FILM["reason"] in root.inner_text()
    canvas.screenshot(f"preview-video-{renderer}", film)
