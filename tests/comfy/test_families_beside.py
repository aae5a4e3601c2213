"""Families beside other nodes, forecasts on every model, which class is which, and wrong entries that are found out."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace
from math import prod

import pytest
import tiny_models
import torch
from test_families import (
    CASES,
    FAMILIES,
    MERGED,
    check_place,
    check_rows,
    distance,
    family,
    flat,
    permuted,
    sampled,
)
from told import report

# of ComfyUI's own code
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


# --------------------------------------------------------------------------- what other nodes add between blocks


def adding(model, name: str):
    """The model with a ControlNet's residuals behind every block, the last one included."""
    from comfy.patcher_extension import WrappersMP

    streams = family(name).entry.streams
    depths = [len(model.model.diffusion_model.get_submodule(stream.blocks)) for stream in streams]
    kinds = {"sd3": ["output"]}.get(name, ["input", "output"])
    generator = torch.Generator().manual_seed(5)
    tokens, width = prod(family(name).grid((1, *CASES[name].shape))), CONTROLLED[name]
    adds = {
        kind: [0.5 * torch.randn(1, tokens, width, generator=generator) for _ in range(depth)]
        for kind, depth in zip(kinds, depths)
    }

    def apply(executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **more):
        whole = {kind: [add.expand(len(x), -1, -1) for add in found] for kind, found in adds.items()}
        return executor(x, t, c_concat, c_crossattn, whole, transformer_options, **more)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "control", apply)
    return model


CONTROLLED = {
    "flux": 128, "flux_kontext": 128, "chroma": 128, "qwen_image_edit": 64, "mage_flow": 64, "lens": 64, "sd3": 192,
    "hunyuan_image": 128, "hunyuan_video_skyreels": 128,
}  # fmt: skip
CONTROLLED = {name: width for name, width in CONTROLLED.items() if name in MERGED}


@pytest.mark.parametrize("name", CONTROLLED)
def test_control_residuals(plain, patched, name):
    controlled = adding(tiny_models.build(name), name)
    expected = sampled(name, controlled)
    assert distance(expected, plain(name)) > 0.01
    model = patched(name, controlled, ratio=0.5, skip_first_blocks=0, select=permuted)
    assert distance(sampled(name, model), expected) < 1e-4 and not any(
        "unmerged" in note for note in report(model).notes
    )
    halved = patched(name, controlled, ratio=0.5, skip_first_blocks=0)
    assert flat(sampled(name, halved)).isfinite().all() and report(halved).blocks_merged == report(halved).blocks
    skipping = patched(name, controlled, ratio=0.5, skip_first_blocks=1)
    assert torch.equal(sampled(name, skipping), expected) and "skip_first_blocks" in report(skipping).notes[0]


def with_patch(name: str, kind: str, patch):
    model = tiny_models.build(name).clone()
    model.set_model_patch(patch, kind)
    return model


@pytest.mark.parametrize("name", [name for name in ("qwen_image_edit", "mage_flow_edit", "lens") if name in MERGED])
def test_patches_between_blocks(plain, patched, name):
    """As the model-patch ControlNets of Qwen-Image: they see all tokens, at their places."""
    add = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(5))

    def patch(args: dict) -> dict:
        image = args["img"].clone()
        image[:, :64] += add * (1 + args["block_index"])
        return {**args, "img": image}

    changed = with_patch(name, "double_block", patch)
    expected = sampled(name, changed)
    assert distance(expected, plain(name)) > 0.01
    model = patched(name, changed, ratio=0.5, select=permuted)
    assert distance(sampled(name, model), expected) < 1e-4 and not any(
        "unmerged" in note for note in report(model).notes
    )
    halved = patched(name, changed, ratio=0.5)
    assert flat(sampled(name, halved)).isfinite().all() and report(halved).blocks_merged == report(halved).blocks


REFUSED_CALLS = [
    ("z_image", "double_block", "between blocks"),
    ("wan21_t2v", "double_block", "between blocks"),
    ("wan21_t2v", "attn1_patch", "inside of blocks"),
    ("wan21_vace", "attn2_patch", "inside of blocks"),
]


@pytest.mark.parametrize(("name", "kind", "why"), [case for case in REFUSED_CALLS if case[0] in MERGED])
def test_patches_that_need_all_tokens(patched, name, kind, why):
    changed = with_patch(name, kind, lambda args: args if kind == "double_block" else args["x"])
    model = patched(name, changed, ratio=0.5)
    assert torch.equal(sampled(name, model), sampled(name, changed))
    assert len(report(model).notes) == 1 and why in report(model).notes[0]


@pytest.mark.parametrize("name", [name for name in ("qwen_image", "wan21_t2v", "kandinsky5_image") if name in MERGED])
def test_slots_of_other_nodes(patched, name):
    """Skip-layer guidance answers in the place of a block."""
    changed = tiny_models.build(name).clone()
    changed.set_model_patch_replace(lambda args, extra: args, "dit", "double_block", 0)
    model = patched(name, changed, ratio=0.5)
    try:
        expected = sampled(name, changed)
    except Exception as error:  # Kandinsky's slot
        pytest.skip(f"ComfyUI itself raises: {error}")
    assert torch.equal(sampled(name, model), expected)
    assert "in the place of double_block 0" in report(model).notes[0]


# --------------------------------------------------------------------------- forecasting, on every model


@pytest.mark.parametrize("name", tiny_models.available())
def test_forecast(plain, patched, name):
    """The note that tokens are not merged is there once, and only where they are not."""
    case = CASES[name]
    model = patched(name, ratio=0.5, tolerance=1.0, end_percent=0.0)
    # Of eight steps from a sigma of 80 or more down to nothing, each is too far from the ones before.
    flow = float(model.get_model_object("model_sampling").sigma_max) <= 1.0
    latent = sampled(name, model, steps=8 if flow else 24)
    told = report(model)
    assert told.finished and flat(latent).isfinite().all()
    assert told.counts["forecast"] > 0 and told.counts["full"] > 0
    assert all(told.notes.count(note) == 1 for note in told.notes)
    unmerged = [note for note in told.notes if note.startswith("tokens are not merged: ")]
    if family(name).why_unmerged:
        assert case.why in family(name).why_unmerged and len(unmerged) == 1 and case.why in unmerged[0]
        assert torch.equal(flat(sampled(name, patched(name, ratio=0.0))), flat(plain(name)))
    else:
        assert not told.notes


@pytest.mark.parametrize("name", [name for name in tiny_models.available() if CASES[name].why])
def test_why_not_merged(plain, patched, name):
    """A model that can't be merged says so at the node; a call that can't be, in the notes of its run."""
    from comfyui_toma.toma_core.settings import SettingsError

    if family(name).why_unmerged:
        with pytest.raises(SettingsError, match=CASES[name].why):
            patched(name, ratio=0.5)
    else:
        model = patched(name, ratio=0.5)
        assert torch.equal(flat(sampled(name, model)), flat(plain(name)))
        assert [note for note in report(model).notes if CASES[name].why in note] == report(model).notes != []


# --------------------------------------------------------------------------- which class is which


def test_classes_of_other_packs(comfy):
    """A pack's own class counts as what it derives from; ComfyUI's own that are not in the table are unknown."""
    from comfyui_toma.toma_core.patcher.families.table import _BY_CLASS, REFUSED, entry_of

    network = tiny_models.build("wan21_t2v").model.diffusion_model
    kind = type(network)
    theirs = type("WanOfAPack", (kind,), {"__module__": "custom_nodes.pack"})
    new = type("WanOfANewRelease", (kind,), {"__module__": "comfy.ldm.wan.model_new"})
    derived = type("HumoOfAPack", (sys.modules[kind.__module__].HumoWanModel,), {"__module__": "custom_nodes.pack"})
    try:
        network.__class__ = theirs
        assert entry_of(network).name == "wan"
        blocks = network._modules.pop("blocks")
        assert entry_of(network) is None, "its blocks are somewhere else"
        network._modules["blocks"] = blocks
        network.__class__ = new
        assert entry_of(network) is None
        network.__class__ = derived
        assert "sort tokens by frame" in entry_of(network)
    finally:
        network._modules.setdefault("blocks", blocks)
        network.__class__ = kind
    assert not set(_BY_CLASS) & set(REFUSED)


def test_every_entry_names_a_class_that_a_tiny_model_has(comfy):
    """On the newest release; on others some classes are not there yet."""
    from comfyui_toma.toma_core.patcher.families.table import _BY_CLASS, REFUSED

    kinds = [type(tiny_models.build(name).model.diffusion_model) for name in tiny_models.available()]
    met = {f"{kind.__module__}:{kind.__qualname__}" for kind in kinds}
    there = {name for name in {*_BY_CLASS, *REFUSED} if exists(name)}
    assert there <= met


def exists(name: str) -> bool:
    module, _, kind = name.partition(":")
    try:
        return hasattr(importlib.import_module(module), kind)
    except ModuleNotFoundError:
        return False


# --------------------------------------------------------------------------- a table that is wrong is found out

FIRST_ROWS = {name for name in FAMILIES if name not in ("sd35_medium", "auraflow")}
WRONG = {
    # model: (index of the stream, what it says wrongly)
    "flux_masked": [(0, {"masks": ()}), (1, {"masks": ()}), (1, {"start": "first"})],
    "flux_kontext": [(0, {"start": "at_end"}), (1, {"start": "at_end"})],
    "hunyuan_video_ref": [(0, {"start": "first"}), (1, {"start": "first"})],
    "qwen_image_edit": [(0, {"start": "at_end"}), (0, {"text_first": False})],
    "qwen_image_edit_2511": [(0, {"bounds": ()})],
    "lens_masked": [(0, {"text_first": True}), (0, {"masks": ()})],
    "ideogram4_masked": [(0, {"masks": ()}), (0, {"start": "first"})],
    "z_image": [(0, {"start": "at_end"}), (0, {"start": "first"})],
    "z_image_omni": [(0, {"bounds": ()}), (0, {"start": "first"})],
    "lumina2": [(0, {"start": "first"})],
    "krea2_edit": [(0, {"start": "at_end"}), (0, {"start": "first"})],
    "omnigen2_edit": [(0, {"start": "first"})],
    "boogu_edit": [(0, {"start": "first"}), (1, {"start": "first"})],
    "auraflow": [(1, {"start": "first"})],
    "wan21_fun_control": [(0, {"start": "first"})],
    "wan21_bernini": [(0, {"start": "at_end"})],
    "wan21_scail": [(0, {"start": "first"})],
    "wan22_5b_i2v": [(0, {"per_frame": {}})],
    "cosmos_predict2_i2v": [(0, {"per_frame": {}})],
    "wan21_vace": [(1, {"rows": {"freqs": 1}}), (1, {"rows": {"x": 1}}), (1, {"side": False})],
}


def is_found_out(plain, patched, name: str) -> bool:
    try:
        check_rows(plain, patched, name)
        check_place(patched, name)
    except (AssertionError, RuntimeError, ValueError, TypeError, IndexError):
        return True
    return False


@pytest.mark.parametrize(
    ("name", "stream", "wrong"),
    [pytest.param(name, *case, id=f"{name}: {case}") for name in WRONG if name in MERGED for case in WRONG[name]],
)
def test_wrong_entry(plain, patched, monkeypatch, name, stream, wrong):
    from comfyui_toma.toma_core.patcher.families import entry as words
    from comfyui_toma.toma_core.patcher.families import table

    wan = inspect.getsource(importlib.import_module("comfy.ldm.wan.model"))
    if name == "wan21_bernini" and "context_latents" not in wan:
        pytest.skip("Wan of this release takes no context_latents (Bernini)")
    said = family(name).entry
    wrong = {key: getattr(words, value) if key == "start" else value for key, value in wrong.items()}
    streams = [replace(s, **wrong) if i == stream else s for i, s in enumerate(said.streams)]
    for network in said.networks:
        monkeypatch.setitem(table._BY_CLASS, network, replace(said, streams=tuple(streams)))
    assert is_found_out(plain, patched, name)


@pytest.mark.parametrize("name", sorted(FIRST_ROWS))
def test_first_rows_instead_of_the_kept_ones(plain, patched, monkeypatch, name):
    from comfyui_toma.toma_core.patcher.families.rows import Cut

    right = Cut._rows
    monkeypatch.setattr(Cut, "_rows", lambda *args: right(*args).sort(1).values)
    with pytest.raises(AssertionError):
        check_rows(plain, patched, name)
