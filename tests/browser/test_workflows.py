"""Every shipped workflow by drop, from Templates and by deep link, with no missing node."""

import json

import pytest
from canvas import READY, ROOT

PACKS = {"ComfyUI-ToMA": ROOT / "workflows", "toma_demo_pack": ROOT / "tests" / "demo_pack" / "workflows"}
SHIPPED = [(pack, path) for pack, folder in PACKS.items() for path in sorted(folder.glob("*.json"))]
NAMES = [path.stem for _, path in SHIPPED]


def same_graph(canvas, path) -> None:
    saved = json.loads(path.read_text(encoding="utf-8"))
    canvas.wait_for_nodes(len(saved["nodes"]))
    assert canvas.missing() == []
    loaded = canvas.page.evaluate("() => app.graph.nodes.map((n) => [n.type, n.widgets_values ?? null, n.pos[0]])")
    assert sorted(n[0] for n in loaded) == sorted(n["type"] for n in saved["nodes"])
    now = canvas.page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize().nodes))")
    assert values_kept(now) == values_kept(saved["nodes"])
    links = canvas.page.evaluate("() => app.graph.serialize().links.length")
    assert links == len(saved["links"])


def values_kept(nodes: list[dict]) -> list:
    """Of a node with a preset, the preset: the page shows its values as they are today."""
    ours = [(node["type"], node.get("widgets_values")) for node in nodes if node["type"].startswith("ToMA")]
    return [values[:1] if kind == "ToMA" and values[0] != "custom" else values for kind, values in ours]


def test_what_is_shipped():
    assert {
        "sdxl", "flux", "z-image-turbo", "qwen-image", "wan-video", "flux-kontext", "sdxl-hires", "compare"
    } <= set(NAMES)  # fmt: skip
    for _, path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        assert "Note" in text and str(ROOT) not in text
        assert path.with_suffix(".jpg").exists(), "a thumbnail"
        if path.parent == PACKS["ComfyUI-ToMA"]:
            assert "Demo" not in text


def values_of(name: str, kind: str) -> list:
    nodes = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))["nodes"]
    return next(node["widgets_values"] for node in nodes if node["type"] == kind)


def test_what_the_samplers_are_set_to():
    assert values_of("sdxl", "KSampler")[3:5] == [6, "dpmpp_2m_sde"]
    assert values_of("z-image-turbo", "KSampler")[2] <= 8


def test_the_turbo_workflow_merges(canvas):
    saved = json.loads((ROOT / "workflows" / "z-image-turbo.json").read_text(encoding="utf-8"))
    canvas.page.evaluate("(saved) => app.loadGraphData(saved)", saved)
    canvas.page.wait_for_timeout(800)
    canvas.close_dialogs()
    node = canvas.page.evaluate("() => app.graph.nodes.find((n) => n.type === 'ToMA').id")
    inner = canvas.element(node, "schedule").query_selector(".toma-inner")
    assert canvas.widget(node, "tolerance") == 0, "with a tolerance the run decides whether it merges"
    assert inner.get_attribute("data-kinds").split().count("merged") >= 4


@pytest.mark.parametrize("path", [path for _, path in SHIPPED], ids=NAMES)
def test_loads_by_drop(canvas, renderer, path):
    canvas.drop(path)
    same_graph(canvas, path)


@pytest.mark.parametrize("path", [path for _, path in SHIPPED], ids=NAMES)
def test_nodes_are_saved_as_tall_as_what_they_show(canvas, path):
    canvas.use_vue(False)
    canvas.page.evaluate("(saved) => app.loadGraphData(saved)", json.loads(path.read_text(encoding="utf-8")))
    canvas.page.wait_for_timeout(800)
    canvas.close_dialogs()
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    saved = {n["id"]: n["size"][1] for n in nodes if n["type"] in ("ToMA", "ToMAPreview", "ToMACompare")}
    for number, height in saved.items():
        now = canvas.page.evaluate("(id) => app.graph.getNodeById(id).size[1]", number)
        assert abs(now - height) <= 20, "a line of the caption more or less"


def load_template(canvas, pack: str, name: str) -> None:
    page = canvas.page
    page.get_by_role("button", name="Templates").first.click()
    dialog = page.get_by_role("dialog").first
    dialog.get_by_text(pack, exact=True).first.click()
    page.get_by_test_id(f"template-workflow-{name}").click()
    dialog.wait_for(state="hidden")


@pytest.mark.parametrize(("pack", "path"), SHIPPED, ids=NAMES)
def test_loads_from_templates(canvas, pack, path):
    load_template(canvas, pack, path.stem)
    same_graph(canvas, path)


def test_template_in_both_renderers(canvas, renderer):
    load_template(canvas, "ComfyUI-ToMA", "sdxl")
    same_graph(canvas, ROOT / "workflows" / "sdxl.json")
    canvas.frame()
    canvas.screenshot(f"template-sdxl-{renderer}")


def test_deep_link_and_reload_of_a_saved_file(canvas, server, tmp_path):
    """In fresh pages: a template by address, then a saved workflow by drop, with the values it had."""
    page = canvas.page
    page.goto(f"{server.url}/?template=sdxl&source=ComfyUI-ToMA")
    page.wait_for_function(READY, timeout=60_000)
    same_graph(canvas, ROOT / "workflows" / "sdxl.json")
    node = page.evaluate("() => app.graph.nodes.find((n) => n.type === 'ToMA').id")
    canvas.set_widget(node, "ratio", 0.35)
    canvas.set_widget(node, "end_percent", 0.8)
    saved = tmp_path / "saved.json"
    saved.write_text(page.evaluate("() => JSON.stringify(app.graph.serialize())"), encoding="utf-8")
    page.goto(server.url)
    page.wait_for_function(READY, timeout=60_000)
    ids = canvas.drop(saved)
    values = [canvas.widget(ids["ToMA"], name) for name in ("preset", "ratio", "end_percent")]
    assert values == ["custom", 0.35, 0.8]
