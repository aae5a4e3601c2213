"""The heat map in the page: of a run that was broken on purpose in one corner, and of a video, whose frame is chosen by
the slider, by the keyboard, and by the widget."""

import json
from base64 import b64encode
from pathlib import Path

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


def shown(canvas, record: dict, images: int) -> int:
    """A preview that has got this record of a run and as many black images; its id."""
    page = canvas.page
    picture = bytes(page.evaluate(PIXEL))
    page.route("**/view?*record.json*", lambda route: route.fulfill(json=record))
    page.route("**/view?*record.png*", lambda route: route.fulfill(body=picture, content_type="image/png"))
    node = canvas.build([{"id": "look", "type": "ToMAPreview", "pos": [0, 0], "size": [400, 0]}], [])["look"]
    canvas.frame(node)
    page.evaluate(
        """([id, count]) => {
          const images = Array.from({length: count}, () => ({filename: "record.png"}));
          app.graph.getNodeById(id).onExecuted({toma: [{images, picks: {filename: "record.json"}}]});
        }""",
        [node, images],
    )
    drawn = "(id) => app.graph.getNodeById(id).widgets.find((w) => w.name === 'picks').element.dataset.map"
    page.wait_for_function(drawn, arg=node, timeout=20_000)
    page.wait_for_timeout(300)
    return node


@pytest.fixture
def forget(canvas):
    yield
    canvas.page.unroute("**/view?*record.json*")
    canvas.page.unroute("**/view?*record.png*")
    canvas.build([], [])


@pytest.fixture
def film(canvas, forget):
    return shown(canvas, FILM, IMAGES)


@pytest.fixture(scope="module")
def broken_record(comfy) -> dict:
    import broken_forecast
    import folder_paths
    import torch
    from comfyui_toma.nodes.preview import ToMAPreview

    images = torch.zeros(1, 128, 128, 3)
    output = ToMAPreview.execute(broken_forecast.sampled(), images, step=0, blocks="", style="forecast error")
    name = output.ui["toma"][0]["picks"]["filename"]
    return json.loads((Path(folder_paths.get_temp_directory()) / name).read_text(encoding="utf-8"))


REDS = """(root) => {
  const canvas = root.querySelector(".toma-stage canvas"), context = canvas.getContext("2d");
  const at = (x, y) => context.getImageData(canvas.width * x, canvas.height * y, 1, 1).data[0];
  const places = Array.from({length: 16}, (_, i) => (i + 0.5) / 16);
  const all = places.flatMap((x) => places.map((y) => ({corner: x < 0.25 && y < 0.25, red: at(x, y)})));
  const reds = (corner) => all.filter((one) => one.corner === corner).map((one) => one.red);
  return {corner: reds(true), rest: reds(false)};
}"""


def test_the_map_is_bright_in_the_corner_that_was_broken_at_every_step(canvas, renderer, broken_record, forget):
    node = shown(canvas, broken_record, 1)
    root, maps = canvas.element(node, "picks"), set()
    for step in range(1, broken_record["steps"] + 1):
        canvas.set_widget(node, "step", step)
        maps.add(root.get_attribute("data-map"))
        red = root.evaluate(REDS)
        assert min(red["corner"]) > max(red["rest"]), "red rises with the error"
    assert maps == {str(found["step"] + 1) for found in broken_record["errors"]} and len(maps) > 1
    canvas.screenshot(f"preview-broken-corner-{renderer}", node)


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
