"""The demo workflow in the page: dropped, queued by the button, looked at from all sides."""

import pytest
from canvas import ROOT

DEMO = ROOT / "tests" / "demo_pack" / "workflows" / "toma-demo.json"


@pytest.fixture(scope="module")
def ran(canvas, renderer, demo_weights):
    """The demo, dropped and run by the queue button; the ids of its nodes by type."""
    ids = canvas.drop(DEMO)
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
    canvas.page.wait_for_timeout(1000)
    return ids


def pixels(canvas, node) -> str:
    return canvas.element(node, "picks").evaluate("(root) => root.querySelector('.toma-stage canvas').toDataURL()")


def caption(canvas, node) -> str:
    return canvas.element(node, "picks").evaluate("(root) => root.querySelector('.toma-caption').textContent")


def test_overlay_changes_with_the_step_slider_and_the_blocks(canvas, renderer, ran):
    node, page = ran["ToMAPreview"], canvas.page
    canvas.frame(node, 1.2)
    slider = canvas.element(node, "picks").query_selector("input[type=range]")
    last = pixels(canvas, node)
    assert "step 12 of 12" in caption(canvas, node)
    box = slider.bounding_box()
    page.mouse.click(box["x"] + 6, box["y"] + box["height"] / 2)
    page.wait_for_timeout(200)
    first = pixels(canvas, node)
    assert "step 1 of 12 · chosen at step 1" in caption(canvas, node) and first != last
    assert canvas.widget(node, "step") == 1, "the slider sets the widget"
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert "step 6 of 12" in caption(canvas, node) and pixels(canvas, node) != first
    before = pixels(canvas, node)
    canvas.element(node, "picks").query_selector('button[data-name="single"]').click()
    page.wait_for_timeout(200)
    assert canvas.widget(node, "blocks") == "single" and pixels(canvas, node) != before
    for style in ("regions", "density", "kept tokens"):
        canvas.set_widget(node, "style", style)
        page.wait_for_timeout(200)
        canvas.screenshot(f"preview-{style.replace(' ', '-')}-{renderer}", node)


def test_dots_on_the_page_are_the_tokens_it_counts(canvas, renderer, ran):
    node = ran["ToMAPreview"]
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


def test_picks_came_while_sampling(canvas, renderer, ran):
    """That they come at most four times a second: tests/nodes/test_live.py, with a clock of its own."""
    from comfyui_toma.toma_core.settings import PRESETS

    picks = canvas.page.evaluate("() => window.tomaPicks")
    kept = round((1 - PRESETS["balanced"]["flux"].ratio) * 32 * 32)
    assert {len(pick["kept"]) for pick in picks} == {kept}
    assert len({pick["node"] for pick in picks}) == 1
    live = canvas.page.evaluate(
        """() => app.graph.nodes.filter((n) => n.type === "ToMA").map((n) =>
             n.widgets.find((w) => w.name === "schedule").element.querySelector(".toma-live")?.innerText ?? null)"""
    )
    assert sum("tokens kept" in (text or "") for text in live) == 1, "only the node that merges shows picks"


def test_comparison_says_what_it_cost_and_saved(canvas, renderer, ran):
    text = canvas.element(ran["ToMACompare"], "summary").text_content()
    assert "PSNR" in text and "SSIM" in text and "a step instead of" in text


def test_picks_are_there_again_after_another_workflow_was_shown(canvas, renderer, ran):
    page = canvas.page
    page.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    page.wait_for_function("() => app.graph.nodes.length === 0")
    tabs = page.locator('[data-testid="topbar-workflow-tabs"], .workflow-tabs')  # the latter before 0.18
    tabs.get_by_text("toma-demo").last.click()
    canvas.wait_for_nodes(13)
    page.wait_for_timeout(2500)
    assert "tokens kept" in caption(canvas, ran["ToMAPreview"])
    assert "PSNR" in canvas.element(ran["ToMACompare"], "summary").text_content()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_nodes_hold_what_they_show(canvas, renderer, ran, theme):
    """Resized, zoomed and collapsed, in both themes: nothing sticks out. Writes the screenshots to look at."""
    page = canvas.page
    canvas.use_theme(theme)
    try:
        for type_, widget in (("ToMA", "schedule"), ("ToMAPreview", "picks"), ("ToMACompare", "summary")):
            node = ran[type_]
            for zoom, grow in ((1.2, 0), (0.5, 80), (1.2, -400)) if theme == "dark" else ((1.2, 0),):
                original = canvas.resize(node, grow)
                canvas.frame(node, zoom)
                assert_inside(canvas, node, widget)
                if grow <= 0:
                    name = f"{type_.lower()}-{renderer}-{theme}" + ("-small" if grow else "")
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
