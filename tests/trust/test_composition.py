"""Every core node that takes and gives a MODEL, before and after ToMA. The nodes are found, not listed."""

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
            model.remove_wrappers_with_key("outer_sample", "toma")
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


def test_the_table_names_every_node(bench):
    from comfyui_version import __version__

    text = TABLE.read_text(encoding="utf-8")
    if f"ComfyUI {__version__}:" not in text:
        return  # the table is of another release
    missing = [node for node in composing.model_nodes() if f"| {node} |" not in text]
    assert not missing, f"not in {TABLE.name}: {missing}. Run: python dev.py bench composition"
    assert composing.BAD not in text
