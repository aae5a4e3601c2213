"""Every model of tests/support/tiny_models.py in the real ComfyUI: merged where it can be, forecast everywhere.

That every row is the right one is shown by tokens in another order: all of them are kept, but permuted, each image of
the batch in its own way. Then the result must be that of the plain run.
"""

from __future__ import annotations

import pytest
import tiny_models
import torch
from told import report

# of ComfyUI's own code
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

CASES = tiny_models.CASES
MERGED = [name for name in tiny_models.available() if not CASES[name].why]
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


@pytest.mark.parametrize("name", DITS)
def test_each_token_has_its_rows(plain, patched, name):
    size = awkward(name)
    model = patched(name, ratio=0.5, select=permuted)
    assert distance(sampled(name, model, **size), plain(name, **size)) < 1e-4
    assert not report(model).notes
    assert report(model).evaluations[-1].why == "no tokens were merged here", "else all are not kept"
