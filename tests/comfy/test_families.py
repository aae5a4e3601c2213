"""Every model of tests/support/tiny_models.py in the real ComfyUI: merged where it can be, forecast everywhere.

That every row is the right one is shown by tokens in another order: all of them are kept, but permuted, each image of
the batch in its own way. Then the result must be that of the plain run.
"""

from __future__ import annotations

import functools

import pytest
import tiny_models
import torch
from told import flops_saved, report

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
    return Merge(tiles, destinations, kept, features.new_zeros(0), source=kept.argsort(1))


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
    assert report(model).evaluations[-1].kind == "merged" and not report(model).tokens, "not all were kept"


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
    assert flops_saved(report(model)) == pytest.approx(1 - run / full, abs=FLOPS_OFF.get(name, 0.01))
    assert report(model).flops_full == pytest.approx(full, rel=0.05)
