"""Wrong input of every kind: each call ends in a clear message or a correct result, never in a traceback of ours."""

import math
import random

import builders
import pytest
import torch
from comfy_here import finish
from comfy_server import ROOT
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

COUNT = {"calls": 0}
CALLS, PROMPTS, PICTURES = 7000, 2600, 60
QUICK = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate, Phase.shrink],
}

ODD = [
    None, True, False, "", "x", "8", "0", "balanced", "whole block", "equal", "<img src=x onerror=alert(1)>", b"x",
    math.nan, math.inf, -math.inf, 1e308, -1e-308, 10**30, -(10**30), -2, -1, 0, 1, 101, 0.9000001, -0.0,
    [], [1], {}, {"a": 1}, (), object(), len, torch.zeros(2), torch.tensor(0.5),
]  # fmt: skip


def schema(node_id):
    import comfyui_toma.nodes as ours

    return getattr(ours, node_id)


def right(spec, chance: random.Random):
    """A value that the widget itself would give."""
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    if kind == "COMBO":
        return chance.choice(options["options"])
    if kind == "INT":
        return chance.randint(options["min"], options["max"])
    if kind == "FLOAT":
        return chance.uniform(options["min"], options["max"])
    return chance.random() < 0.5 if kind == "BOOLEAN" else chance.choice(["", "double", "8x8"])


def widgets(node) -> dict:
    declared = node.INPUT_TYPES()
    both = {**declared["required"], **declared.get("optional", {})}
    return {name: spec for name, spec in both.items() if spec[0] not in ("MODEL", "IMAGE", "CLIP_VISION")}


@pytest.fixture(scope="module")
def others(bench):
    """What a MODEL socket may get from a careless node."""
    import comfy.model_patcher

    class Other(torch.nn.Module):
        diffusion_model = torch.nn.Linear(2, 2)

    cpu = torch.device("cpu")
    return [None, "model", 3, object(), torch.zeros(2), comfy.model_patcher.ModelPatcher(Other(), cpu, cpu)]


def call_node(model, values: dict) -> bool:
    """Whether a model came out; else there was a message that begins with the name of what was wrong."""
    from comfyui_toma.toma_core.patcher import UnsupportedModel
    from comfyui_toma.toma_core.settings import SettingsError

    COUNT["calls"] += 1
    node = schema("ToMA")
    try:
        made = node.execute(model=model, **values).result[0]
    except (SettingsError, UnsupportedModel) as error:
        assert str(error).split()[0].strip(":,") in ("model", *widgets(node)), error
        return False
    held = made.model_options["toma"].settings
    assert 0 <= held.ratio <= 0.95 and 0 <= held.tolerance <= 1 and held.reselect_every >= 1
    return True


def test_calls_of_the_node(bench, others, figure):
    """Values as a link may bring them, which ComfyUI does not check."""
    chance, specs, came_out = random.Random(8), widgets(schema("ToMA")), 0
    for _ in range(CALLS):
        bad = chance.sample(sorted(specs), chance.choice([0, 1, 1, 2, 3]))
        values = {name: chance.choice(ODD) if name in bad else right(spec, chance) for name, spec in specs.items()}
        model = chance.choice(others) if chance.random() < 0.1 else chance.choice(list(bench.models.values()))
        came_out += call_node(model, values)
    assert CALLS // 20 < came_out < CALLS * 19 // 20, came_out
    figure("inputs tried in process", f"{COUNT['calls']}, each a clear message or a result")


@settings(max_examples=200, **QUICK)
@given(
    name=st.sampled_from(["ratio", "tile_size", "reselect_every", "start_percent", "merge", "preset", "tolerance"]),
    value=st.one_of(st.floats(), st.integers(), st.text(), st.binary(), st.lists(st.floats()), st.none()),
)
def test_values_that_hypothesis_thinks_of(bench, name, value):
    chance = random.Random(1)
    values = {key: right(spec, chance) for key, spec in widgets(schema("ToMA")).items()}
    call_node(bench.models["flux"], {**values, "preset": "custom", name: value})


def test_prompts(bench, figure):
    """ComfyUI's own validation of prompts with damaged, missing and extra values of our nodes."""
    import execution

    import nodes

    chance = random.Random(9)
    classes = {name: schema(name) for name in ("ToMA", "ToMAPreview", "ToMACompare")}
    links = [["1", 0], ["9", 0], ["1", 7], ["1"], [[], {}]]
    nodes.NODE_CLASS_MAPPINGS.update(classes)

    async def validate_all() -> int:
        refused = 0
        for _ in range(PROMPTS):
            name = chance.choice(sorted(classes))
            inputs = {
                key: chance.choice(ODD) if chance.random() < 0.15 else right(spec, chance)
                for key, spec in widgets(classes[name]).items()
                if chance.random() < 0.9
            }
            for key in ("model", "images", "reference", "image", "from_a_later_version"):
                if chance.random() < 0.5:
                    inputs[key] = chance.choice([*ODD, *links])
            image = {"width": 8, "height": 8, "batch_size": 1, "color": 0}
            graph = {
                "1": {"class_type": "EmptyImage", "inputs": image},
                "2": {"class_type": name, "inputs": inputs},
            }
            valid, error, _, node_errors = await execution.validate_prompt("id", graph, ["2"])
            for folder in ("nodes", "toma_core"):
                assert str(ROOT / folder) not in str(node_errors), node_errors  # a traceback through our code
            assert valid or error["message"]
            refused += not valid
        return refused

    try:
        refused = finish(validate_all())
    finally:
        for name in classes:
            del nodes.NODE_CLASS_MAPPINGS[name]
    assert refused > PROMPTS // 3
    COUNT["calls"] += PROMPTS
    figure("inputs tried in process", f"{COUNT['calls']}, each a clear message or a result")


@pytest.mark.parametrize("linked", [("preset",), ("start_percent",), ("start_percent", "end_percent")])
def test_values_that_come_by_a_link(bench, monkeypatch, linked):
    """They have no value yet when ComfyUI validates the prompt."""
    import execution

    import nodes

    def add_node(name: str, takes: dict, gives: str) -> None:
        inputs = classmethod(lambda cls: {"required": takes})
        about = {
            "FUNCTION": "run",
            "RETURN_TYPES": (gives,),
            "INPUT_TYPES": inputs,
            "OUTPUT_NODE": bool(takes),
        }
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, type("Node", (), about))

    kinds = {"model": "MODEL", "preset": "COMBO", "start_percent": "FLOAT", "end_percent": "FLOAT"}
    chance = random.Random(3)
    values = {key: right(spec, chance) for key, spec in widgets(schema("ToMA")).items()}
    values |= {"preset": "custom", "start_percent": 0.2, "end_percent": 0.8}
    values |= {key: [key, 0] for key in ("model", *linked)}
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "ToMA", schema("ToMA"))
    for key, kind in kinds.items():
        add_node(f"Source of {key}", {}, kind)
    add_node("Sampler", {"model": ("MODEL",)}, "LATENT")
    graph = {key: {"class_type": f"Source of {key}", "inputs": {}} for key in kinds}
    graph["toma"] = {"class_type": "ToMA", "inputs": values}
    graph["sampler"] = {"class_type": "Sampler", "inputs": {"model": ["toma", 0]}}
    valid, error, _, node_errors = finish(execution.validate_prompt("id", graph, None))
    assert valid, (error, node_errors)


SHAPES = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))


def test_pictures_of_odd_shapes(bench, figure):
    """Preview and Compare with pictures of any shape, some with values that are no numbers."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    model = patch(bench.models["flux"], Settings(reselect_every=2, skip_first_blocks=0), record=True)
    builders.sample(model, 128, 128, steps=2)
    preview, compare = schema("ToMAPreview"), schema("ToMACompare")

    @settings(max_examples=PICTURES, **QUICK)
    @given(
        SHAPES,
        SHAPES,
        st.booleans(),
        st.sampled_from([0.5, math.nan, math.inf, -3.0]),
        st.integers(-5, 20000),
        st.sampled_from(["", "double", "single", "64x64", "<b>"]),
        st.sampled_from(["kept tokens", "regions", "density", "?"]),
    )
    def pictures(first, second, same, value, step, blocks, style):
        COUNT["calls"] += 2
        a, b = torch.full(first, value), torch.full(first if same else second, 0.25)
        for node, inputs in (
            (compare, {"reference": a, "image": b}),
            (preview, {"model": model, "images": a, "step": step, "blocks": blocks, "style": style}),
        ):
            try:
                out = node.execute(**inputs).result
                assert out[0].ndim == 4
            except ValueError as error:
                assert any(name in str(error) for name in inputs), f"{node.__name__}: {error!r}"

    pictures()
    figure("inputs tried in process", f"{COUNT['calls']}, each a clear message or a result")
