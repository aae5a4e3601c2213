"""Every core node that takes and gives a MODEL, before and after ToMA. The nodes are found, not listed."""

import re
from pathlib import Path

import composing

TABLE = Path(__file__).with_name("COMPOSITION.md")
COMPILE = "TorchCompileModel"  # takes a minute of tracing: test_compile.py is about nothing else


def test_nodes_compose_before_and_after(bench, figure):
    chosen = [node for node in composing.distinct() if node != COMPILE]
    outcomes = list(composing.compose_all(bench, only=chosen))
    figure("composition", composing.figure(outcomes))
    bad = [str(outcome) for outcome in outcomes if outcome.status == composing.BAD]
    assert not bad, "\n".join(bad)
    assert sum(outcome.status == composing.GOOD for outcome in outcomes) > len(outcomes) // 2


def test_a_node_that_spoils_the_run_is_noticed(bench):
    """The judgement itself: a node that undoes merging, and one whose effect merging would swallow."""

    class Undo:
        RETURN_TYPES, FUNCTION = ("MODEL",), "undo"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"model": ("MODEL",), "strength": ("FLOAT", {"default": 1.0})}}

        def undo(self, model, strength):
            model = model.clone()
            model.model_options.pop("toma", None)
            model.model_options["transformer_options"].pop("wrappers", None)
            return (model,)

    class Swallowed(Undo):
        def undo(self, model, strength):
            model = model.clone()
            sign = -1 if "toma" in model.model_options else 1
            model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * (1 + 0.5 * sign))
            return (model,)

    assert bench.compose("Undo", Undo, "flux").status == composing.BAD
    swallowed = bench.compose("Swallowed", Swallowed, "flux")
    assert swallowed.status == composing.BAD and "effect is gone" in swallowed.note


def rows_of(text: str) -> dict[str, list[str]]:
    """node -> its row, without the remark"""
    rows = re.findall(r"^\| (?!Node )([^|]+) \|(.+)\|[^|]*\|$", text, re.MULTILINE)
    return {node: [cell.strip() for cell in cells.split("|")] for node, cells in rows}


def test_the_table_is_whole():
    """It counts what it lists, and nothing in it fails."""
    text = TABLE.read_text(encoding="utf-8")
    rows = rows_of(text)
    statuses = {composing.GOOD, composing.NOTHING, composing.ALONE, composing.UNMADE}
    assert all(set(row) <= statuses and len(row) == 2 for row in rows.values())
    good = sum(composing.GOOD in row for row in rows.values())
    assert f"{good} of {len(rows)} nodes compose before and after ToMA" in text


def test_the_table_names_every_node(bench, figure):
    """Of the release that it was made with. Nodes of another one that it does not name are tried here."""
    from comfyui_version import __version__

    text = TABLE.read_text(encoding="utf-8")
    made_with = re.search(r"with ComfyUI ([\d.]+):", text)[1]
    missing = [node for node in composing.model_nodes() if node not in rows_of(text)]
    if made_with == __version__:
        assert not missing, f"not in {TABLE.name}: {missing}. Run: python dev.py bench composition"
    outcomes = list(composing.compose_all(bench, only=missing)) if missing else []
    bad = [str(outcome) for outcome in outcomes if outcome.status == composing.BAD]
    assert not bad, "\n".join(bad)
    figure(
        "table of composition",
        f"made with ComfyUI {made_with}; nodes of {__version__} that it does not name: {len(missing)}, tried here",
    )
