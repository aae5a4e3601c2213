"""The demo workflow in the page: dropped, queued by the button, looked at from all sides."""

import pytest
from build_pictures import nodes_of
from canvas import ROOT, read_workflow

DEMO = ROOT / "tests" / "demo_pack" / "workflows" / "toma-demo.json"


@pytest.fixture(scope="module")
def ran(canvas, renderer, demo_weights):
    """The demo, dropped and run by the queue button; the ids of its nodes by type and row, and of the merged row by
    type alone."""
    canvas.build([], [])  # what falls on a node is not loaded
    canvas.drop(DEMO)
    canvas.page.evaluate(
        """() => {
          if (!window.tomaPicks) app.api.addEventListener("toma.picks", ({detail}) => window.tomaPicks.push(detail));
          window.tomaPicks = [];
          for (const node of app.graph.nodes) if (node.type === "KSampler")
            node.widgets.find((w) => w.name === "seed").value = Math.floor(Math.random() * 1e9);
          const samplers = app.graph.nodes.filter((n) => n.type === "KSampler");
          for (const node of samplers) node.widgets[0].value = samplers[0].widgets[0].value;
        }"""
    )
    canvas.frame()
    error = canvas.run(press=True)
    assert error is None, error
    canvas.page.wait_for_timeout(3000)
    rows = nodes_of(canvas)
    return {**rows, **{kind: rows[kind, "merged"] for kind in ("ToMA", "ToMAPreview", "ToMACompare")}}


def pixels(canvas, node) -> str:
    return canvas.element(node, "picks").evaluate("(root) => root.querySelector('.toma-stage canvas').toDataURL()")


def caption(canvas, node) -> str:
    return canvas.element(node, "picks").evaluate("(root) => root.querySelector('.toma-caption').textContent")


def to_step(canvas, node, step: int) -> None:
    """By mouse to the first step, by keyboard to the one that is wanted."""
    slider = canvas.element(node, "picks").query_selector("input.toma-step")
    box = slider.bounding_box()
    canvas.page.mouse.click(box["x"] + 6, box["y"] + box["height"] / 2)
    for _ in range(step - 1):
        canvas.page.keyboard.press("ArrowRight")
    canvas.page.wait_for_timeout(200)
    assert canvas.widget(node, "step") == step, "the slider sets the widget"


def test_picks_change_with_the_step_and_the_style(canvas, renderer, ran):
    node, page = ran["ToMAPreview", "merged"], canvas.page
    canvas.frame(node, 1.2)
    drawn = {16: pixels(canvas, node)}
    assert "step 16 of 16 · full: outside the merge window · chosen at step 12" in caption(canvas, node)
    to_step(canvas, node, 1)
    assert "step 1 of 16 · full" in caption(canvas, node) and "not merged yet" in caption(canvas, node)
    drawn[1] = pixels(canvas, node)
    # What was left out at one step is kept at the next, so every other pick may be the same: 7 is not one of those.
    to_step(canvas, node, 7)
    assert "step 7 of 16 · merged: inside the merge window · chosen at step 7" in caption(canvas, node)
    assert pixels(canvas, node) not in drawn.values()
    for style in ("regions", "density", "kept tokens"):
        before = pixels(canvas, node)
        canvas.set_widget(node, "style", style)
        page.wait_for_timeout(200)
        assert pixels(canvas, node) != before
        canvas.screenshot(f"preview-{style.replace(' ', '-')}-{renderer}", node)


def test_the_map_goes_with_the_step(canvas, renderer, ran):
    node = ran["ToMAPreview", "forecast"]
    canvas.frame(node, 1.2)
    root, shown = canvas.element(node, "picks"), {}
    for step in (4, 6, 10, 16):
        to_step(canvas, node, step)
        shown[pixels(canvas, node)] = root.get_attribute("data-map")
        assert f"step {step} of 16" in caption(canvas, node)
        assert 1 <= int(root.get_attribute("data-map")) <= step, "the last one up to the step"
    assert len(shown) == len(set(shown.values())) > 1
    assert "No tokens were merged: " in root.inner_text()
    canvas.screenshot(f"preview-forecast-error-{renderer}", node)


def test_dots_on_the_page_are_the_tokens_it_counts(canvas, renderer, ran):
    node = ran["ToMAPreview", "merged"]
    canvas.set_widget(node, "style", "kept tokens")
    canvas.frame(node, 1.2)
    counted = canvas.element(node, "picks").evaluate(
        """(root) => {
          const canvas = root.querySelector(".toma-stage canvas"), side = Math.min(canvas.width, canvas.height);
          const x0 = (canvas.width - side) / 2, y0 = (canvas.height - side) / 2, cell = side / 32;
          const context = canvas.getContext("2d");
          let dots = 0;
          for (let row = 0; row < 32; row++) for (let column = 0; column < 32; column++) {
            const at = [Math.floor(x0 + (column + 0.5) * cell), Math.floor(y0 + (row + 0.5) * cell)];
            const [r, g, b] = context.getImageData(...at, 1, 1).data;
            dots += Math.abs(r - 255) < 12 && Math.abs(g - 210) < 12 && Math.abs(b - 63) < 12;
          }
          return dots;
        }"""
    )
    assert f"{counted} of 1024 tokens kept" in caption(canvas, node)


def test_picks_came_while_sampling_and_gave_their_room_back(canvas, renderer, ran):
    """That they come at most four times a second: tests/nodes/test_live.py, with a clock of its own."""
    picks = canvas.page.evaluate("() => window.tomaPicks")
    assert {len(pick["kept"]) for pick in picks} == {512}
    assert {int(pick["node"]) for pick in picks} == {int(ran["ToMA", "merged"])}
    assert canvas.page.evaluate("() => document.querySelectorAll('.toma-live').length") == 0


def test_comparison_says_what_it_cost_and_saved(canvas, renderer, ran):
    for row in ("forecast", "merged"):
        text = canvas.element(ran["ToMACompare", row], "summary").text_content()
        assert "PSNR" in text and "SSIM" in text and "s/step instead of" in text


def test_wipe_by_mouse_touch_and_keyboard(canvas, renderer, ran):
    node, page = ran["ToMACompare", "merged"], canvas.page
    canvas.frame(node)
    root = canvas.element(node, "summary")
    box = root.query_selector(".toma-wiped").bounding_box()

    def at() -> float:
        clip = root.evaluate("(r) => r.querySelectorAll('.toma-wiped img')[1].style.clipPath")
        assert abs(float(root.query_selector(".toma-wipe").evaluate("(s) => s.value")) - inset(clip)) <= 1
        return inset(clip)

    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.25, y, steps=4)
    page.mouse.up()
    assert abs(at() - 25) < 2
    page.mouse.move(box["x"] + box["width"] * 0.9, y)
    assert abs(at() - 25) < 2, "only while the button is down"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert abs(at() - 27) < 2
    assert root.query_selector(".toma-wiped").bounding_box() == box, "the canvas stayed where it was"
    session = page.context.new_cdp_session(page)
    for kind, across in (("touchStart", 0.5), ("touchMove", 0.7), ("touchMove", 0.75)):
        points = [{"x": box["x"] + box["width"] * across, "y": y}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    session.detach()
    assert root.query_selector(".toma-wiped").bounding_box() == box, "the canvas stayed where it was"
    assert abs(at() - 75) < 2
    pair = root.query_selector_all(".toma-wipe-box")
    assert len(pair) == 2 and all(one.bounding_box()["width"] > 100 for one in pair), "the difference stands beside it"


def inset(clip: str) -> float:
    return float(clip.removeprefix("inset(").removesuffix(")").split()[-1].removesuffix("%").removesuffix("px"))


def test_all_is_there_again_after_another_workflow_was_shown(canvas, renderer, ran):
    page = canvas.page
    page.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    page.wait_for_function("() => app.graph.nodes.length === 0")
    tabs = page.locator('[data-testid="topbar-workflow-tabs"], .workflow-tabs')  # the latter before 0.18
    tabs.get_by_text("toma-demo").last.click()
    canvas.wait_for_nodes(len(read_workflow(DEMO)["nodes"]))
    page.wait_for_timeout(2500)
    assert "tokens kept" in caption(canvas, ran["ToMAPreview", "merged"])
    assert "PSNR" in canvas.element(ran["ToMACompare", "merged"], "summary").text_content()
    for row in ("plain", "forecast", "merged"):
        shown = canvas.element(ran["ToMA", row], "schedule").query_selector(".toma-inner")
        assert shown.get_attribute("data-state") == "done"


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_nodes_hold_what_they_show(canvas, renderer, ran, theme):
    """Resized, zoomed and collapsed, in both themes: nothing sticks out. Writes the screenshots to look at."""
    page = canvas.page
    canvas.use_theme(theme)
    try:
        for type_, widget in (("ToMA", "schedule"), ("ToMAPreview", "picks"), ("ToMACompare", "summary")):
            node = ran[type_]
            for zoom, grow in ((1.2, 0), (0.5, 80), (1.2, -400)) if theme == "dark" else ((1.0, 0), (0.5, 0)):
                original = canvas.resize(node, grow)
                page.wait_for_timeout(400)
                canvas.frame(node, zoom)
                assert_inside(canvas, node, widget)
                if grow <= 0:
                    name = (
                        f"{type_.lower()}-{renderer}-{theme}"
                        + ("-small" if grow else "")
                        + ("-half" if zoom < 1 else "")
                    )
                    canvas.screenshot(name, node)
                canvas.resize(node, to=original)
            if theme == "light":
                continue
            canvas.collapse(node, True)
            assert not canvas.element(node, widget).is_visible()
            canvas.collapse(node, False)
            page.wait_for_timeout(200)
            canvas.frame(node)
            assert canvas.element(node, widget).is_visible()
        canvas.frame()
        canvas.screenshot(f"demo-{renderer}-{theme}")
    finally:
        canvas.use_theme("dark")


def assert_inside(canvas, node, widget) -> None:
    outer, element = canvas.box(node), canvas.element(node, widget)
    inner = element.bounding_box()
    for start, size in (("x", "width"), ("y", "height")):
        assert inner[start] >= outer[start] - 1, f"{widget} sticks out: {inner} of {outer}"
        assert inner[start] + inner[size] <= outer[start] + outer[size] + 1, f"{widget}: {inner} of {outer}"
    clipped = element.evaluate("(root) => root.scrollHeight > root.clientHeight + 1 ? root.scrollHeight : 0")
    assert not clipped, f"{widget} needs {clipped} and has {inner['height']}"
