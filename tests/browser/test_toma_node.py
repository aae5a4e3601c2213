"""The ToMA node in the page: presets, the plan on its strip, its state, by mouse and keyboard."""

import itertools
import json

LIVE = "ToMA.LivePicks"

SETTINGS = (
    "ratio", "tile_size", "reselect_every", "reweight_every", "start_percent", "end_percent", "merge", "budget",
    "skip_first_blocks", "tolerance",
)  # fmt: skip
PLAN = """async ([cases, steps, family, patience]) => {
  const {planOf} = await import("/extensions/ComfyUI-ToMA/plan.js");
  return cases.map((settings) => steps.map((n) => planOf(settings, n, family, patience)));
}"""
MERGE_ACTIONS = {"reselect", "reweight", "reuse"}


def page_plans(page, cases, steps, family="unet") -> list:
    from comfyui_toma.toma_core.plan import PATIENCE

    settings = [{name: as_widget(getattr(case, name)) for name in SETTINGS} for case in cases]
    return page.evaluate(PLAN, [settings, list(steps), family, PATIENCE])


def test_page_and_python_agree_on_the_reuse_schedule(page):
    from comfyui_toma.toma_core.settings import Settings
    from schedules import table

    every, bounds = (1, 2, 3, 5, 10), ((0.0, 1.0), (0.1, 0.9), (0.35, 0.6), (0.5, 0.5), (0.0, 0.33))
    cases = [
        Settings(reselect_every=a, reweight_every=b, start_percent=start, end_percent=end)
        for a, b, (start, end) in itertools.product(every, every, bounds)
    ]
    steps = (1, 2, 4, 7, 20, 50)
    for case, plans in zip(cases, page_plans(page, cases, steps)):
        for n, plan in zip(steps, plans):
            actions = [step["why"] if step["why"] in MERGE_ACTIONS else "none" for step in plan]
            assert actions == [action.value for action in table(case.schedule, n)]
            assert [step["kind"] == "merged" for step in plan] == [case.schedule.active(i, n) for i in range(n)]


def test_what_the_page_says_is_certain_is_so_whatever_the_run_finds(page):
    """The error budget with forecasts that are always right, and always wrong: no step is of a kind that the page had
    ruled out."""
    from comfyui_toma.toma_core.plan import moment_at
    from comfyui_toma.toma_core.settings import Settings

    cases = [Settings(tolerance=0.03, ratio=r, end_percent=e) for r, e in ((0.5, 1.0), (0.5, 0.5), (0.0, 1.0))]
    steps = (1, 2, 3, 8, 20)
    for case, plans in zip(cases, page_plans(page, cases, steps)):
        for (n, plan), error in itertools.product(zip(steps, plans), (0.0, 0.01, 100.0)):
            sigmas, budget, places = [1 - i / n for i in range(n + 1)], case.plan(), []
            for step in range(n):
                moment = moment_at(sigmas[step], sigmas, True)
                kind = budget.next(moment, places).kind.value
                told = plan[step]
                assert kind in [told["kind"], *told.get("or", [])], (n, step, told)
                if kind != "forecast":
                    budget.learn(error)
                    places = [*places, moment.place][-2:]


def as_widget(value):
    return getattr(value, "value", value)


def shown(canvas, node) -> dict:
    return {name: canvas.widget(node, name) for name in SETTINGS}


def preset_values(name: str, family: str) -> dict:
    from comfyui_toma.toma_core.settings import PRESETS

    values = {key: as_widget(getattr(PRESETS[name][family], key)) for key in SETTINGS}
    return {**values, "tile_size": str(values["tile_size"])}


def kinds(canvas, node) -> list[str]:
    return strip(canvas, node).get_attribute("data-kinds").split()


def strip(canvas, node):
    return canvas.element(node, "schedule").query_selector(".toma-inner")


def choose_preset(canvas, node, renderer, name) -> None:
    """By mouse: the arrow of the classic widget until it says so, or the list of the Vue one."""
    page = canvas.page
    if renderer == "vue":
        page.locator(f'[data-node-id="{node}"] [aria-label="preset"]').click()
        page.get_by_role("option", name=name, exact=True).click()
    else:
        canvas.set_widget(node, "preset", "balanced")
        for _ in range(8):
            if canvas.widget(node, "preset") == name:
                break
            x, y = canvas.widget_point(node, "preset", 0.04)
            page.mouse.click(x, y)
            page.wait_for_timeout(350)
    page.wait_for_timeout(300)


def test_widgets_follow_the_preset_and_touching_one_makes_it_custom(canvas, renderer, small_graph):
    node, page = small_graph["toma"], canvas.page
    canvas.frame(node)
    assert canvas.widget(node, "preset") == "balanced"
    assert shown(canvas, node) == preset_values("balanced", "dit")
    for name in ("fast", "paper", "quality"):
        choose_preset(canvas, node, renderer, name)
        assert canvas.widget(node, "preset") == name
        assert shown(canvas, node) == preset_values(name, "dit")
    choose_preset(canvas, node, renderer, "paper")
    before, heights = kinds(canvas, node), bar_heights(canvas, node)
    drag_ratio(canvas, node, renderer)
    page.wait_for_timeout(400)
    assert canvas.widget(node, "preset") == "custom"
    assert canvas.widget(node, "ratio") != preset_values("paper", "dit")["ratio"]
    assert kinds(canvas, node) == before, "the ratio does not change what the steps do"
    assert bar_heights(canvas, node) != heights, "but how much they compute"
    canvas.screenshot(f"toma-custom-{renderer}", node)


def bar_heights(canvas, node) -> list[float]:
    return canvas.element(node, "schedule").evaluate(
        "(root) => [...root.querySelectorAll('.toma-bar')].map((bar) => bar.getBoundingClientRect().height)"
    )


def drag_ratio(canvas, node, renderer) -> None:
    page = canvas.page
    if renderer == "vue":
        box = page.locator(f'[data-node-id="{node}"] [role="slider"]').first.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        to = (x + 40, y)
    else:
        x, y = canvas.widget_point(node, "ratio", 0.5)
        to = canvas.widget_point(node, "ratio", 0.85)
    page.mouse.move(x, y)
    page.mouse.down()
    for part in (0.3, 0.6, 1.0):
        page.mouse.move(x + (to[0] - x) * part, y)
        page.wait_for_timeout(40)
    page.mouse.up()


def test_strip_follows_the_widgets_and_the_sampler(canvas, renderer, small_graph):
    from comfyui_toma.toma_core.plan import ReuseSchedule

    node = small_graph["toma"]
    asked = {"merge": "each layer", "ratio": 0.5, "reselect_every": 6, "end_percent": 0.75, "tolerance": 0.0}
    for name, value in asked.items():
        canvas.set_widget(node, name, value)
    schedule = ReuseSchedule(6, 1, 0, 0.75)
    for steps in (12, 30):
        canvas.set_widget(small_graph["sample"], "steps", steps)
        canvas.page.wait_for_timeout(600)
        assert kinds(canvas, node) == ["merged" if schedule.active(i, steps) else "full" for i in range(steps)]
    assert "30 steps of KSampler" in canvas.element(node, "schedule").inner_text()
    canvas.frame(node)
    canvas.screenshot(f"toma-schedule-{renderer}", node)


def test_strip_by_keyboard_says_what_each_step_will_be(canvas, renderer, small_graph):
    node, page = small_graph["toma"], canvas.page
    canvas.frame(node)
    whole = canvas.element(node, "schedule")
    assert strip(canvas, node).get_attribute("data-state") == "plan"
    assert "dashed steps are forecast if that stays within" in whole.inner_text()
    for word in ("full 3 or more", "merged 0", "forecast up to 9"):
        assert word in whole.inner_text()
    whole.query_selector(".toma-bars").focus()
    page.keyboard.press("ArrowRight")
    assert "step 1 of 12 · full: how wrong a forecast would be is not known yet" in whole.inner_text()
    page.keyboard.press("ArrowRight")
    assert "step 2 of 12 · full: how wrong a forecast would be is not known yet" in whole.inner_text()
    page.keyboard.press("ArrowRight")
    assert "step 3 of 12 · forecast if the run allows it, else full" in whole.inner_text()
    page.keyboard.press("End")
    assert "step 12 of 12 · full: near the end of the run" in whole.inner_text()
    page.keyboard.press("Escape")
    assert "12 steps of KSampler" in whole.inner_text()
    assert page.evaluate("() => app.graph.nodes.length") == 5, "keys did not reach the canvas"


def test_strip_promises_nothing_that_cannot_be(canvas, renderer, small_graph):
    """Three steps are too few to forecast one, and a bypassed node does nothing."""
    node, page = small_graph["toma"], canvas.page
    canvas.set_widget(small_graph["sample"], "steps", 3)
    page.wait_for_timeout(600)
    text = canvas.element(node, "schedule").inner_text
    assert "too few steps: nothing will be forecast" in text() and "dashed" not in text()
    canvas.set_widget(small_graph["sample"], "steps", 12)
    page.evaluate("(id) => (app.graph.getNodeById(id).mode = 4)", node)
    page.wait_for_timeout(600)
    assert "bypassed: this node does nothing" in text() and "dashed" not in text()
    assert "toma-off" in strip(canvas, node).get_attribute("class")
    canvas.frame(node)
    canvas.screenshot(f"toma-bypassed-{renderer}", node)
    page.evaluate("(id) => (app.graph.getNodeById(id).mode = 0)", node)
    page.wait_for_timeout(600)
    assert "dashed steps are forecast" in text() and "toma-off" not in strip(canvas, node).get_attribute("class")


def test_tolerance_moves_in_steps_that_matter(canvas, renderer, small_graph):
    """A hundredth at a time; finer values can be typed and are shown."""
    node = small_graph["toma"]
    options = canvas.page.evaluate(
        "(id) => { const w = app.graph.getNodeById(id).widgets.find((w) => w.name === 'tolerance');"
        " return [w.options.step2, w.options.precision, w.options.round]; }",
        node,
    )
    assert options == [0.01, 3, 0.0001]
    canvas.set_widget(node, "tolerance", 0.005)
    assert canvas.widget(node, "tolerance") == 0.005


def test_node_is_as_tall_as_what_it_shows(canvas, renderer, small_graph):
    node, page = small_graph["toma"], canvas.page
    canvas.frame(node)
    for grow in (0, 300):
        canvas.resize(node, grow)
        page.wait_for_timeout(900)
        outer, inner = canvas.box(node), strip(canvas, node).bounding_box()
        below = outer["y"] + outer["height"] - inner["y"] - inner["height"]
        assert 0 <= below < 80, f"{below} empty pixels below the strip"  # Vue: a badge and a row of its own
    hidden = page.evaluate(
        "(id) => app.graph.getNodeById(id).widgets.find((w) => w.name === 'carry_detail').hidden", node
    )
    assert hidden, "the dead widget is out of sight"


def test_values_are_kept_in_the_workflow_file(canvas, renderer, small_graph):
    node, page = small_graph["toma"], canvas.page
    canvas.set_widget(node, "ratio", 0.65)
    canvas.set_widget(node, "reselect_every", 7)
    before = {"preset": canvas.widget(node, "preset"), **shown(canvas, node)}
    saved = json.loads(page.evaluate("() => JSON.stringify(app.graph.serialize())"))
    stored = next(n for n in saved["nodes"] if n["type"] == "ToMA")["widgets_values"]
    assert stored[:2] == ["custom", 0.65] and len(stored) == 12, "the strip itself is not stored"
    page.evaluate("(graph) => app.loadGraphData(graph)", saved)
    page.wait_for_timeout(700)
    again = page.evaluate("() => app.graph.nodes.find((n) => n.type === 'ToMA').id")
    assert {"preset": canvas.widget(again, "preset"), **shown(canvas, again)} == before
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    assert "schedule" not in prompt[str(again)]["inputs"]


def test_paper_shows_the_values_of_the_connected_family(canvas, small_graph):
    node = small_graph["toma"]
    canvas.set_widget(node, "preset", "paper")
    canvas.page.wait_for_timeout(300)
    assert shown(canvas, node) == preset_values("paper", "dit")
    canvas.set_widget(small_graph["load"], "name", "sdxl-like unet")
    canvas.page.wait_for_timeout(600)
    assert shown(canvas, node) == preset_values("paper", "unet")


def test_only_the_newest_pick_is_drawn(canvas, small_graph):
    """Fifty events in one go, as after a pause of the page: drawn once or twice."""
    page, node = canvas.page, small_graph["toma"]
    canvas.frame(node)
    show = """([id, from, to]) => {
      for (let step = from; step < to; step++) {
        const pick = {node: String(id), step, group: "double", grid: [8, 8], kept: [1, 5, step]};
        app.api.dispatchEvent(new CustomEvent("toma.picks", {detail: pick}));
      }
    }"""
    page.evaluate(show, [node, 0, 1])
    page.wait_for_timeout(500)
    page.evaluate(
        """(id) => {
          const root = app.graph.getNodeById(id).widgets.find((w) => w.name === "schedule").element;
          const context = root.querySelector(".toma-live canvas").getContext("2d"), clear = context.clearRect;
          window.tomaDraws = 0;
          context.clearRect = function (...box) { window.tomaDraws += 1; return clear.apply(this, box); };
        }""",
        node,
    )
    page.evaluate(show, [node, 1, 51])
    page.wait_for_timeout(500)
    assert 1 <= page.evaluate("() => window.tomaDraws") <= 2
    assert "step 51" in canvas.element(node, "schedule").inner_text()


def test_setting_turns_the_live_picks_off(canvas, small_graph, demo_weights):
    page = canvas.page
    page.evaluate(
        """([sample, load]) => {
          const make = (type) => { const node = LiteGraph.createNode(type); app.graph.add(node); return node; };
          const decode = make("VAEDecode"), show = make("PreviewImage");
          app.graph.getNodeById(sample).connect(0, decode, 0);
          app.graph.getNodeById(load).connect(1, decode, 1);
          decode.connect(0, show, 0);
          app.graph.getNodeById(sample).widgets.find((w) => w.name === "steps").value = 3;
          window.tomaSeen = 0;
          app.api.addEventListener("toma.picks", () => window.tomaSeen++);
        }""",
        [small_graph["sample"], small_graph["load"]],
    )
    for name, value in {"tolerance": 0.0, "ratio": 0.5, "end_percent": 1.0}.items():
        canvas.set_widget(small_graph["toma"], name, value)
    counts = []
    for on in (False, True):
        page.evaluate("([id, on]) => app.extensionManager.setting.set(id, on)", [LIVE, on])
        page.wait_for_timeout(300)
        canvas.set_widget(small_graph["sample"], "seed", page.evaluate("() => Math.floor(Math.random() * 1e9)"))
        assert canvas.run() is None
        counts.append(page.evaluate("() => window.tomaSeen"))
    assert counts[0] == 0 and counts[1] > 0


def test_help_opens_with_its_picture(canvas, small_graph):
    page, node = canvas.page, small_graph["toma"]
    canvas.frame(node)
    page.evaluate("(id) => app.canvas.selectNode(app.graph.getNodeById(id))", node)
    page.get_by_test_id("info-button").click()
    picture = page.locator('img[src*="docs/ToMA/picture.jpg"]').first
    picture.wait_for(timeout=15_000)
    page.wait_for_function("(img) => img.complete && img.naturalWidth > 0", arg=picture.element_handle())
    assert page.get_by_text("Each column is a step of the connected sampler").first.is_visible()
    canvas.screenshot("help")
    page.get_by_test_id("info-button").click()
    page.wait_for_timeout(300)
