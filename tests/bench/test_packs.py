"""The bench of other packs, on a pack that is written here: what it says of its nodes, and of one that hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PACK = """
class Node:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "change", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "strength": ("FLOAT", {"default": 0.8, "min": 0.0, "max": 1.0})}}


class Scales(Node):
    def change(self, model, strength):
        model = model.clone()
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * strength)
        return (model,)


class Blanks(Node):  # the same answer at each step: all that may be is forecast, nothing has to be merged
    def change(self, model, strength):
        model = model.clone()
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0)
        return (model,)


class Raises(Node):
    def change(self, model, strength):
        raise ValueError("not with this model")


class Idle(Node):
    def change(self, model, strength):
        return (model.clone(),)


class NotBesideToMA(Node):
    def change(self, model, strength):
        if "toma" in model.model_options:
            raise KeyError("transformer_options")
        return (model.clone(),)


class NeedsMore(Node):
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "net": ("CONTROL_NET",)}}


class SpoilsTheModel(Node):
    def change(self, model, strength):
        next(model.model.diffusion_model.parameters()).data.mul_(strength)
        return (model.clone(),)


class CountsCalls(Node):  # for good, on the shared model; after twelve calls nothing is seen of it
    def change(self, model, strength):
        network, calls = model.model.diffusion_model, [0]
        original = type(network).forward

        def forward(*args, **kwargs):
            calls[0] += 1
            return original(network, *args, **kwargs) * (strength if calls[0] <= 12 else 1)

        network.forward = forward
        return (model.clone(),)


class Holds(Node):  # the ninth answer that the network gives; beside forecasts there are no nine
    def change(self, model, strength):
        from comfy.patcher_extension import WrappersMP

        model, kept = model.clone(), []

        def run(executor, *args, **kwargs):
            kept.clear()
            return executor(*args, **kwargs)

        def network(executor, *args, **kwargs):
            if len(kept) < 9:
                kept.append(executor(*args, **kwargs))
            return kept[-1]

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "holds", run)
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "holds", network)
        return (model,)


class GivesTheOther(Node):
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "other": ("MODEL",)}}

    def change(self, model, other):
        return (other,)


class Ends(Node):
    def change(self, model, strength):
        if "Flux" in type(model.model).__name__:
            import os

            os._exit(3)
        raise ValueError("not with this model")


NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (
        Blanks, CountsCalls, Ends, GivesTheOther, Holds, Idle, NeedsMore, NotBesideToMA, Raises, Scales, SpoilsTheModel,
    )
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The rows that the command keeps, what it wrote and what it printed."""
    folder = tmp_path_factory.mktemp("packs")
    (folder / "all" / "a-pack").mkdir(parents=True)
    (folder / "all" / "a-pack" / "__init__.py").write_text(PACK)
    (folder / "all" / "a-pack" / "PACK_COMMIT").write_text("someone/a-pack 0123456789abcdef 2026-01-02\n")
    (folder / "all" / "broken").mkdir()
    (folder / "all" / "broken" / "__init__.py").write_text("import a_package_that_nobody_has\n")
    (folder / "table.md").write_text("# Title\n\n<!-- packs -->\nold\n<!-- /packs -->\n\nThe rest.\n")
    command = [sys.executable, str(TESTS / "bench" / "packs.py"), str(folder / "all")]
    options = {"models": "flux", "steps": 12, "load-seconds": 900, "stage-seconds": 300}
    options |= {"json": folder / "rows.json", "write": folder / "table.md"}
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1), done.stderr
    rows = {row["pack"]: row for row in json.loads((folder / "rows.json").read_text())}
    return rows, (folder / "table.md").read_text(), done


def test_outcomes(run):
    nodes = {node["node"]: node["models"] for node in run[0]["a-pack"]["nodes"]}
    found = {node: {result["status"] for result in models.values()} for node, models in nodes.items()}
    assert found == {
        "Blanks": {"composes"},
        "CountsCalls": {"composes"},
        "Ends": {"fails without us too"},
        "GivesTheOther": {"composes"},
        "Holds": {"composes"},
        "Idle": {"no effect of its own here"},
        "NeedsMore": {"not tried"},
        "NotBesideToMA": {"fails only with us"},
        "Raises": {"fails without us too"},
        "Scales": {"composes"},
        "SpoilsTheModel": {"composes"},
    }
    assert nodes["NeedsMore"]["flux"]["note"] == "needs a CONTROL_NET"
    assert "after ToMA: KeyError" in nodes["NotBesideToMA"]["flux"]["note"]
    assert nodes["Scales"]["flux"]["asked"]["guider"] == 12
    assert nodes["Holds"]["flux"]["note"].startswith("leaves out work by itself")
    assert "ended with code 3" in nodes["Ends"]["flux"]["note"]


def test_what_a_pack_changes_by_itself_is_told(run):
    nodes = {node["node"]: node["models"] for node in run[0]["a-pack"]["nodes"]}
    assert nodes["SpoilsTheModel"]["flux"]["changes"] == "changes the shared model by itself"
    assert nodes["CountsCalls"]["flux"]["changes"] == "changes the shared model by itself"
    assert not nodes["Scales"]["flux"]["changes"] and not run[0]["a-pack"]["plain"]


def test_a_pack_that_can_not_be_loaded_stops_nothing(run):
    assert run[0]["broken"]["loaded"] == "No module named 'a_package_that_nobody_has'"
    assert run[2].returncode == 1  # of the node that fails only beside ToMA


def test_the_table_takes_its_place(run):
    _, text, done = run
    assert text.startswith("# Title\n\n<!-- packs -->\n") and text.endswith("<!-- /packs -->\n\nThe rest.\n")
    assert "| someone/a-pack | 0123456 | 2026-01-02 | 11 | 6 | 1 |  | 2 | 1 | 1 |" in text
    assert "CountsCalls, SpoilsTheModel changes the shared model by itself" in text and "old" not in text
    totals = "1 of 2 packs loaded, 1 of them with nodes that take and give a MODEL; of 11 such nodes 6 compose, "
    assert totals in text and totals in done.stdout
    assert str(TESTS.parent) not in text


def test_the_docs_have_the_kept_rows():
    sys.path.insert(0, str(TESTS / "bench"))
    from packslib import report

    rows = json.loads((TESTS / "bench" / "results" / "packs.json").read_text(encoding="utf-8"))
    docs = (TESTS.parent / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert report.totals(rows) in docs and all((row["source"] or row["pack"]) in docs for row in rows)
    assert report.count(rows)[report.BAD] == 0
