"""Workflow files that nobody checked: markup stays text, and damaged values end in a message or a result."""

import json
import re

import pytest
from canvas import PIXEL, ROOT
from comfy_server import PromptError

EVIL = '<img src="x" onerror="window.tomaHarmed = true"><b class="evil">'
HARM = "() => window.tomaHarmed || document.querySelectorAll('.evil, img[src=\"x\"]').length"
WIDGETS = (
    "preset", "ratio", "tile_size", "reselect_every", "reweight_every", "start_percent", "end_percent", "merge",
    "budget", "skip_first_blocks", "carry_detail", "tolerance",
)  # fmt: skip
SAVED = ["custom", 0.5, "8", 2, 2, 0.0, 1.0, "whole block", "equal", 0, True, 0.03]
LOADER, PROMPT, LATENT, TOMA, SAMPLER, SAVER = 1, 2, 3, 100, 200, 300
STEPS = 2

# What a ToMA node of a workflow file may hold.
CASES: dict[str, object] = {
    "as saved": SAVED,
    "before tolerance": SAVED[:-1],
    "before carry_detail": SAVED[:-2],
    "an early version": SAVED[:3],
    "nothing": [],
    "null": None,
    "a later version": [*SAVED, "new", 5, {"a": 1}],
    "by name": {"preset": "fast", "ratio": 0.25, "from_a_later_version": 1},
    "unknown preset": ["warp", *SAVED[1:]],
    "preset of another kind": [7, *SAVED[1:]],
    "preset called constructor": ["constructor", *SAVED[1:]],
    "one value too many in front": ["custom", *SAVED],
    "one value missing in front": SAVED[1:],
    "numbers as text": ["custom", "0.5", 8, "2", "2", "0", "1", *SAVED[7:]],
    "text for numbers": ["custom", *[EVIL] * 11],
    "nulls": ["custom", *[None] * 11],
    "objects": ["custom", *[{"a": 1}] * 5, [], [1], {}, [[]], {}, {}],
    "huge": ["custom", 1e308, "8", 10**15, 10**15, -1e308, 1e308, *SAVED[7:9], 10**15, True, 1e308],
    "negative": ["custom", -0.5, "-8", -2, 0, -1, -1, *SAVED[7:9], -7, True, -1],
}
DAMAGED_STEPS = {"huge": 10**12, "unknown preset": 2.5, "nulls": "many", "objects": {"a": 1}}


def node(number: int, kind: str, inputs: list, outputs: list, values, title: str | None = None) -> dict:
    return {
        "id": number, "type": kind, "pos": [number % 100 * 420, number // 100 * 700], "size": [380, 400], "flags": {},
        "order": 0, "mode": 0, "properties": {}, "widgets_values": values, **({"title": title} if title else {}),
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"name": type_, "type": type_, "links": links} for type_, links in outputs],
    }  # fmt: skip


def workflow(cases: dict[str, object], steps: dict[str, object], title: str | None = None) -> dict:
    """A file with one loader and, for each case, a ToMA node, a sampler and an output."""
    nodes, links = [], []

    def link(start: int, slot: int, end: int, input_: int, kind: str) -> int:
        links.append([len(links) + 1, start, slot, end, input_, kind])
        return len(links)

    for i, (name, values) in enumerate(cases.items()):
        toma, sampler, saver = TOMA + i, SAMPLER + i, SAVER + i
        model = link(LOADER, 0, toma, 0, "MODEL")
        parts = [
            ("model", "MODEL", link(toma, 0, sampler, 0, "MODEL")),
            ("positive", "CONDITIONING", link(PROMPT, 0, sampler, 1, "CONDITIONING")),
            ("negative", "CONDITIONING", link(PROMPT, 0, sampler, 2, "CONDITIONING")),
            ("latent_image", "LATENT", link(LATENT, 0, sampler, 3, "LATENT")),
        ]
        out = link(sampler, 0, saver, 0, "LATENT")
        values_of_sampler = [1, "fixed", steps.get(name, STEPS), 1.0, "euler", "simple", 1.0]
        nodes += [
            node(toma, "ToMA", [("model", "MODEL", model)], [("MODEL", [parts[0][2]])], values, title),
            node(sampler, "KSampler", parts, [("LATENT", [out])], values_of_sampler, title),
            node(saver, "SaveLatent", [("samples", "LATENT", out)], [], [f"untrusted{i}"]),
        ]

    def all_from(start: int) -> list[int]:
        return [number for number, from_, *_ in links if from_ == start]

    nodes += [
        node(LOADER, "ToMADemoLoader", [], [("MODEL", all_from(LOADER)), ("VAE", [])], ["flux"]),
        node(PROMPT, "ToMADemoPrompt", [], [("CONDITIONING", all_from(PROMPT))], ["fox on blue", 64, 64]),
        node(LATENT, "ToMADemoLatent", [], [("LATENT", all_from(LATENT))], [64, 64, 1]),
    ]
    last = {"last_node_id": 400, "last_link_id": len(links)}
    return {"nodes": nodes, "links": links, "groups": [], "config": {}, "extra": {}, "version": 0.4, **last}


def load(canvas, saved: dict) -> None:
    canvas.page.evaluate("(saved) => app.loadGraphData(saved)", saved)
    canvas.page.wait_for_timeout(800)
    canvas.close_dialogs()


def test_damaged_values_end_in_a_message_or_a_result(canvas, renderer, server, demo_weights, figure):
    """Loaded in the page, whose strips go on working; then what the page makes of them, sent to the server."""
    load(canvas, workflow(CASES, DAMAGED_STEPS))
    canvas.page.wait_for_timeout(600)  # two looks of every strip at its widgets
    for i, name in enumerate(CASES):
        bars = canvas.element(TOMA + i, "schedule").evaluate("(r) => r.querySelectorAll('.toma-bar').length")
        assert 0 < bars <= 200, name
        canvas.set_widget(TOMA + i, "skip_first_blocks", 3)
        assert canvas.widget(TOMA + i, "preset") == "custom", f"{name}: a touched widget makes it custom"
    if renderer == "vue":
        return  # the prompt is the same
    load(canvas, workflow(CASES, {}))
    prompt = canvas.page.evaluate("async () => (await app.graphToPrompt()).output")
    ran, refused = {}, {}
    for i, name in enumerate(CASES):
        parts = (LOADER, PROMPT, LATENT, TOMA + i, SAMPLER + i, SAVER + i)
        try:
            server.queue({str(number): prompt[str(number)] for number in parts})
            ran[name] = prompt[str(TOMA + i)]["inputs"]
        except PromptError as error:
            refused[name] = told(error, str(TOMA + i))
    old = {"before tolerance", "before carry_detail", "an early version"}
    assert {"as saved", "nothing", "a later version"} | old <= set(ran)
    assert {"unknown preset", "text for numbers", "nulls", "objects", "huge", "negative"} <= set(refused)
    assert "preset" in refused["unknown preset"] and "ratio" in refused["text for numbers"]
    figure("damaged workflow files", f"{len(CASES)}: {len(ran)} run, {len(refused)} refused by the input's name")


def told(error: PromptError, number: str) -> str:
    """Which inputs a refusal names; it must be ours, by name, and without a traceback through our code."""
    assert str(ROOT) not in json.dumps(error.details.get("node_errors", {})) and "KeyError" not in str(error)
    if "exception_type" in error.details:
        assert error.details["exception_type"].endswith("SettingsError"), error.details
        names = [error.details["exception_message"].split()[0]]
    else:
        errors = error.details["node_errors"][number]["errors"]
        names = [e["extra_info"].get("input_name") or e["details"].split()[0] for e in errors]
    assert names and set(names) <= set(WIDGETS), (names, error.details)
    return " ".join(names)


ROWS = [[0, "full", EVIL, 1.5, 1], [1, "merged", EVIL, None, 0.5], [9e9, EVIL, EVIL, EVIL, EVIL], EVIL, None, [{}]]
RUN = {"run": EVIL, "over": True, "steps": 2, "evaluations": ROWS, "summary": EVIL, "notes": [EVIL, {}], "settings": {}}
PICKS = {
    "steps": 2, "evaluations": ROWS, "frames": 1, "groups": [EVIL, "single"], "message": EVIL, "reason": EVIL,
    "errors": [{"step": 1, "size": [1, 1, 2], "most": EVIL, "error": ["AAA="]}],
    "picks": [{"step": 0, "group": EVIL, "grid": [1, 2], "kept": ["AAAAAA=="], "assignment": ["AAAAAAAAAAA="]}],
}  # fmt: skip
SHOW = """([toma, preview, compare, evil, run]) => {
  const pick = {node: String(toma), step: evil, group: evil, grid: [8, 8], kept: [1, 5]};
  app.api.dispatchEvent(new CustomEvent("toma.picks", {detail: pick}));
  app.api.dispatchEvent(new CustomEvent("toma.picks", {detail: {...pick, node: evil}}));
  for (const detail of [null, 7, {}, {node: evil}, {node: {}}])
    app.api.dispatchEvent(new CustomEvent("toma.unsampled", {detail}));
  app.graph.getNodeById(compare).onExecuted({toma_summary: [evil], toma_wipe: [
    {reference: [{filename: "evil.png"}], image: [{filename: "evil.png"}], most: evil, numbers: [evil]}]});
  for (const told of [null, 7, {}, {...run, evaluations: evil}, {...run, steps: -5}, {...run, steps: 1e308}])
    app.api.dispatchEvent(new CustomEvent("toma.run", {detail: told && {...told, node: String(toma)}}));
  const settings = Object.fromEntries(app.graph.getNodeById(toma).widgets.map((w) => [w.name, w.value]));
  const last = {...run, run: "last" + evil, node: String(toma), settings};
  app.api.dispatchEvent(new CustomEvent("toma.run", {detail: last}));
  const output = {images: [{filename: "evil.png"}], picks: {filename: "evil.json"}};
  app.graph.getNodeById(preview).onExecuted({toma: [output]});
}"""
SHOWS = """([id, name, text]) =>
  app.graph.getNodeById(id).widgets.find((widget) => widget.name === name).element.textContent.includes(text)"""


@pytest.fixture
def evil_files(canvas):
    """The files that a preview is told to show, as a server that takes anything might give them."""
    page = canvas.page
    picture = bytes(page.evaluate(PIXEL))
    page.route("**/view?*evil.json*", lambda route: route.fulfill(json=PICKS))
    page.route("**/view?*evil.png*", lambda route: route.fulfill(body=picture, content_type="image/png"))
    yield
    page.unroute("**/view?*evil.json*")
    page.unroute("**/view?*evil.png*")


def test_markup_of_a_workflow_stays_text(canvas, renderer, evil_files, figure):
    page, preview, compare = canvas.page, 50, 51
    saved = workflow({"evil": [EVIL] * 12}, {}, title=EVIL)
    saved["nodes"] += [
        node(preview, "ToMAPreview", [], [], [0, EVIL, EVIL, EVIL], EVIL),
        node(compare, "ToMACompare", [], [], [], EVIL),
    ]
    load(canvas, saved)
    for _ in range(10):  # the page moves a new workflow about by itself
        canvas.frame(TOMA, 0.8)
        if canvas.element(TOMA, "schedule").evaluate("(root) => root.clientWidth"):
            break
    page.wait_for_function(SHOWS, arg=[TOMA, "schedule", f"steps of {EVIL}"], timeout=20_000)
    page.evaluate(SHOW, [TOMA, preview, compare, EVIL, RUN])
    for number, name, text in (
        (TOMA, "schedule", EVIL),
        (preview, "picks", EVIL),
        (compare, "summary", EVIL),
    ):
        page.wait_for_function(SHOWS, arg=[number, name, text], timeout=20_000)
    assert not page.evaluate(HARM), "text of a workflow has become an element"
    page.evaluate(
        "(id) => app.graph.getNodeById(id).onExecuted({toma: [{images: [], picks: {filename: '<b>'}}]})",
        preview,
    )
    page.wait_for_timeout(300)
    assert not page.evaluate(HARM)
    canvas.build([], [])
    figure("markup in workflows", "titles, widgets, picks and reports are shown as text")


def test_a_run_saved_in_a_workflow_is_taken_as_data(canvas, renderer):
    """Whatever the property holds, the strip is drawn."""
    for kept in (RUN, {**RUN, "evaluations": [ROWS] * 9999}, {"run": {}}, [], 7, EVIL, {**RUN, "steps": 1e99}):
        saved = workflow({"evil": SAVED}, {})
        next(n for n in saved["nodes"] if n["type"] == "ToMA")["properties"] = {"toma_run": kept}
        load(canvas, saved)
        bars = canvas.element(TOMA, "schedule").evaluate("(r) => r.querySelectorAll('.toma-bar').length")
        assert 0 < bars <= 400
        assert not canvas.page.evaluate(HARM)
    canvas.build([], [])


def test_no_way_to_make_elements_from_text():
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML"
    ways += r"|srcdoc|\beval\(|new Function|javascript:"
    files = sorted((ROOT / "web").glob("*.js"))
    found = [f"{file.name}: {way}" for file in files for way in re.findall(ways, file.read_text(encoding="utf-8"))]
    assert len(files) > 5 and not found, found
