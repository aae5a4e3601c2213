"""Every model of tests/support/tiny_models.py in the real ComfyUI: merged where it can be, forecast everywhere.

That every row is the right one is shown by tokens in another order: all of them are kept, but permuted, each image of
the batch in its own way. Then the result must be that of the plain run.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import replace
from math import prod

import pytest
import tiny_models
import torch
from told import report

# of ComfyUI's own code
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

CASES = tiny_models.CASES
MERGED = tiny_models.merged()
UNETS = {case.name for case in CASES.values() if "model_channels" in case.config and "num_res_blocks" in case.config}
DITS = [name for name in MERGED if name not in UNETS]


def flat(latent) -> torch.Tensor:
    parts = latent.unbind() if latent.is_nested else [latent]
    return torch.cat([part.flatten() for part in parts]).float()


def distance(a, b) -> float:
    return ((flat(a) - flat(b)).norm() / flat(b).norm()).item()


def permuted(features, keep, tiles, *rest):
    """In the place of `reselect`: all tokens stay, each image's in an order of its own."""
    from comfyui_toma.toma_core.merge import Merge
    from comfyui_toma.toma_core.selection import Destinations

    images, tokens = len(features), tiles.tokens
    generator = torch.Generator().manual_seed(tokens)
    kept = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(images)])
    destinations = Destinations(torch.zeros(images, 1, tokens, dtype=torch.long), tokens)
    return Merge(
        tiles, destinations, kept, torch.ones(images, tokens), features.new_zeros(0), source=kept.argsort(1)
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(comfy):
    """plain(name, **size): the latent without the pack, sampled once."""
    known: dict = {}

    def sampled(name: str, **size):
        key = (name, *size.items())
        if key not in known:
            known[key] = tiny_models.sample(CASES[name], tiny_models.build(name), **size)
        return known[key]

    return sampled


@pytest.fixture(scope="module")
def patched(comfy):
    """patched(name, ratio, ...): the tiny model with the pack."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    def make(name: str, model=None, select=None, **settings):
        options = {"select": select} if select else {}
        return patch(model or tiny_models.build(name), Settings(**{"reselect_every": 1, **settings}), **options)

    return make


def sampled(name: str, model, **size):
    return tiny_models.sample(CASES[name], model, **size)


# --------------------------------------------------------------------------- merging

FROM_AN_EMPTY_LATENT = {"wan21_flow_rvs"}  # whose tokens are all alike


@pytest.mark.parametrize("name", MERGED)
def test_merged(plain, patched, name):
    assert torch.equal(flat(sampled(name, patched(name, ratio=0.0))), flat(plain(name)))
    off = {}
    for ratio in (0.25, 0.75):
        model = patched(name, ratio=ratio, skip_first_blocks=0)
        latent = sampled(name, model)
        told = report(model)
        assert not told.notes and told.blocks_merged == told.blocks > 0
        assert all(after == max(1, round((1 - ratio) * before)) for before, after in told.tokens.values())
        assert flat(latent).isfinite().all()
        off[ratio] = distance(latent, plain(name))
    assert 0 < off[0.25] < off[0.75] or name in FROM_AN_EMPTY_LATENT


def awkward(name: str) -> dict:
    """Sides that are no multiple of a patch, and two images, as far as ComfyUI itself samples that."""
    case = CASES[name]
    *_, rows, columns = case.shape
    off = 1 if case.odd else 4
    return {"rows": rows - off, "columns": columns + off, "batch": 2 if case.pairs else 1}


def check_rows(plain, patched, name: str) -> None:
    """All tokens in another order: the same result."""
    size = awkward(name)
    model = patched(name, ratio=0.5, select=permuted)
    assert distance(sampled(name, model, **size), plain(name, **size)) < 1e-4
    assert not report(model).notes
    assert report(model).evaluations[-1].why == "no tokens were merged here", "not all were kept"


@pytest.mark.parametrize("name", DITS)
def test_each_token_has_its_rows(plain, patched, name):
    check_rows(plain, patched, name)


class Seen:
    """What the first block of a model is given: at each call its sequences [B, L, C], and its whole numbers."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, []
        self.block = tiny_models.build(name).model.diffusion_model.get_submodule(family(name).entry.streams[0].blocks)[
            0
        ]

    def __call__(self, model, seed: int = 0) -> list[tuple[list[torch.Tensor], list]]:
        kind, calls = type(self.block), []
        original = kind.forward

        @functools.wraps(original)
        def forward(block, *args, **kwargs):
            if block is self.block:
                values = [*args, *kwargs.values()]
                sequences = [
                    v.flatten(1, -2).clone() for v in values if isinstance(v, torch.Tensor) and v.ndim in (3, 5)
                ]
                calls.append((sequences, kwargs.get("timestep_zero_index")))
            return original(block, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(kind, "forward", forward)
            sampled(self.name, model, steps=2, seed=seed)
        return calls


def check_place(patched, name: str) -> None:
    """Image tokens are those that depend on the noise: of them a part is kept, all others stay."""
    from comfyui_toma.toma_core.merge import reselect

    merges = []

    def select(*args):
        merges.append(reselect(*args))
        return merges[-1]

    seen, model = Seen(name), tiny_models.build(name)
    whole, bound = seen(model)[-1]
    other, _ = seen(model, seed=1)[-1]
    at = next(i for i, (a, b) in enumerate(zip(whole, other)) if not torch.equal(a, b))
    changed = (whole[at] != other[at]).any(-1).any(0).nonzero().flatten().tolist()
    shorter, shorter_bound = seen(patched(name, ratio=0.5, skip_first_blocks=0, select=select))[-1]
    kept = torch.cat([merge.kept for merge in merges])
    tokens, start = merges[0].tiles.tokens, 0 if CASES[name].frame_kept else changed[0]
    if name in REFERENCES_LISTEN:
        start = changed[-1] + 1 - tokens
    assert changed[-1] < start + tokens or len(changed) % 32 == 0, "padding to a multiple of 32 listens to the image"
    for image, rest, index in zip(whole[at], shorter[at], kept):
        left = torch.cat((image[:start], image[start + index], image[start + tokens :]))
        assert torch.equal(rest, left)
    if isinstance(bound, int):
        assert torch.equal(whole[at][:, bound:], shorter[at][:, shorter_bound:])
    elif bound:
        assert [end == whole[at].shape[1] for _, end in bound] == [
            end == shorter[at].shape[1] for _, end in shorter_bound
        ]


REFERENCES_LISTEN = {"z_image_omni"}  # to the image, before the first block


@pytest.mark.parametrize("name", [name for name in DITS if name not in FROM_AN_EMPTY_LATENT])
def test_where_the_image_lies(patched, name):
    check_place(patched, name)


def family(name: str):
    from comfyui_toma.toma_core.patcher import family_of

    return family_of(tiny_models.build(name))


FAMILIES = [
    "flux", "chroma_radiance", "qwen_image_edit", "mage_flow", "lens", "joy_image", "z_image", "lumina2", "krea2",
    "anima", "cosmos_predict2_i2v", "wan21_t2v", "wan22_5b_i2v", "wan21_vace", "wan21_scail", "hunyuan_video_15",
    "sd35_medium", "auraflow", "kandinsky5", "ideogram4", "omnigen2", "boogu", "ltxv_i2v",
]  # fmt: skip
FAMILIES = [name for name in FAMILIES if name in MERGED]


@pytest.mark.parametrize("name", [name for name in FAMILIES if CASES[name].cfg != 1])
def test_prompts_one_by_one(plain, patched, monkeypatch, name):
    """With little memory ComfyUI evaluates prompt and negative prompt in calls of their own."""
    model = patched(name, ratio=0.5, select=permuted)
    monkeypatch.setattr(model.model, "memory_required", lambda *args, **kwargs: 1e18)
    latent = sampled(name, model)
    assert distance(latent, plain(name)) < 1e-4 and not report(model).notes


@pytest.mark.parametrize("name", FAMILIES)
def test_block_by_block(plain, patched, name):
    """As published: merged at each block anew."""
    model = patched(name, ratio=0.5, merge="each layer", skip_first_blocks=1)
    latent = sampled(name, model)
    assert not report(model).notes and 0 < report(model).blocks_merged < report(model).blocks
    assert flat(latent).isfinite().all() and distance(latent, plain(name)) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_first_blocks_left_alone(plain, patched, name):
    model = patched(name, ratio=0.5, skip_first_blocks=1, select=permuted)
    assert distance(sampled(name, model), plain(name)) < 1e-4 and not report(model).notes
    model = patched(name, ratio=0.5, skip_first_blocks=1)
    assert flat(sampled(name, model)).isfinite().all()
    assert report(model).blocks_merged == report(model).blocks - (2 if name == "wan21_vace" else 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision(patched, name):
    model = tiny_models.build(name, torch.bfloat16)
    reference = sampled(name, model)
    halved = patched(name, model, ratio=0.5)
    assert flat(sampled(name, halved)).isfinite().all()
    assert not report(halved).notes and report(halved).blocks_merged == report(halved).blocks
    assert distance(sampled(name, patched(name, model, ratio=0.5, select=permuted)), reference) < 0.05


# With a timestep for each frame, modulation is computed for each kept token.
FLOPS_OFF = {"cosmos_predict2_i2v": 0.06}


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_flops(patched, name):
    """Against torch's own counter, over the blocks."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(q, k, v, *rest, **more) -> int:
        return sdpa_flop_count(q, k, v)

    on_cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    lists = {stream.blocks for stream in family(name).entry.streams}

    def counted(model) -> int:
        with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
            sampled(name, model)
        blocks = {
            path: by_op for path, by_op in counter.get_flop_counts().items()
            if path.rpartition(".")[2].isdigit() and path.split(".")[-2] in lists
        }  # fmt: skip
        return sum(sum(by_op.values()) for by_op in blocks.values())

    model = patched(name, ratio=0.75)
    full, run = counted(tiny_models.build(name)), counted(model)
    assert report(model).flops_saved == pytest.approx(1 - run / full, abs=FLOPS_OFF.get(name, 0.01))
    assert report(model).flops_full == pytest.approx(full, rel=0.05)


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
    assert distance(sampled(name, model), expected) < 1e-4 and not report(model).notes
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
    assert distance(sampled(name, model), expected) < 1e-4 and not report(model).notes
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
    latent = sampled(name, model, steps=8)
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
    "flux_kontext": [(0, {"start": "last"}), (1, {"start": "last"})],
    "hunyuan_video_ref": [(0, {"start": "first"}), (1, {"start": "first"})],
    "qwen_image_edit": [(0, {"start": "last"}), (0, {"text_first": False})],
    "qwen_image_edit_2511": [(0, {"bounds": ()})],
    "lens_masked": [(0, {"text_first": True}), (0, {"masks": ()})],
    "ideogram4_masked": [(0, {"masks": ()}), (0, {"start": "first"})],
    "z_image": [(0, {"start": "last"}), (0, {"start": "first"})],
    "z_image_omni": [(0, {"bounds": ()}), (0, {"start": "first"})],
    "lumina2": [(0, {"start": "first"})],
    "krea2_edit": [(0, {"start": "last"}), (0, {"start": "first"})],
    "omnigen2_edit": [(0, {"start": "first"})],
    "boogu_edit": [(0, {"start": "first"}), (1, {"start": "first"})],
    "auraflow": [(1, {"start": "first"})],
    "wan21_fun_control": [(0, {"start": "first"})],
    "wan21_bernini": [(0, {"start": "last"})],
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
