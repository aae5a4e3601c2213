"""Whole sampling runs against the method written down a second time (by_hand.py).

The checks are functions, so that test_mutations.py can show that each of them fails when the code is broken.
"""

from __future__ import annotations

import builders
import by_hand
import pytest
import setups
import torch
from told import report

RUN = {"width": 128, "height": 128, "steps": 3, "cfg": 2.0}
EACH_STEP = {"ratio": 0.5, "tile_size": 8, "reselect_every": 1, "reweight_every": 1}
PUBLISHED = {**EACH_STEP, "merge": "each layer"}


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def same(ours, by_hand, unmerged, merged_steps: int) -> None:
    """The same up to rounding, and something that is worth comparing."""
    out, told = ours
    assert told.counts["merged"] == merged_steps and told.blocks_merged == told.blocks, told.sentence()
    assert far(unmerged, by_hand) > 0.05, "merging does nothing here, this test would show nothing"
    assert far(out, by_hand) < 1e-3


def sampled(patched, **run):
    out = builders.sample(patched, **{**RUN, **run})
    return out, report(patched)


def check_riding_flux(models, merged, conds: str = "plain", **run) -> None:
    """Kept tokens ride through the whole network; the others follow in the space of clean estimates."""
    model = models["flux"]
    positive, negative = getattr(setups, conds)(model, 128, 128)
    run = {"positive": positive, "negative": negative, **run}
    wanted = builders.sample(by_hand.riding_flux(model), **{**RUN, **run})
    plain = builders.sample(model, **{**RUN, **run})
    same(sampled(merged(model, **EACH_STEP), **run), wanted, plain, RUN["steps"] - 1)


RIDING = {
    "one image": {"cfg": 1.0}, "two prompts": {}, "two images": {"batch": 2, "cfg": 1.0}, "two of both": {"batch": 2},
    "controlnet": {"conds": "control"},
}  # fmt: skip


@pytest.mark.parametrize("case", RIDING)
def test_riding_through_flux(models, merged, case):
    check_riding_flux(models, merged, **RIDING[case])


def test_the_parts_of_riding_matter(models):
    """Without the ControlNet's part, or with copied velocities in the place of clean estimates, it is another image."""
    model = models["flux"]
    positive, negative = setups.control(model, 128, 128)
    run = {**RUN, "positive": positive, "negative": negative}
    right = builders.sample(by_hand.riding_flux(model), **run)
    for part in ("with_control", "own_noise"):
        assert far(builders.sample(by_hand.riding_flux(model, **{part: False}), **run), right) > 0.01, part


def check_published_flux(models, merged, **run) -> None:
    model = models["flux"]
    wanted = builders.sample(by_hand.published_flux(model), **{**RUN, **run})
    plain = builders.sample(model, **{**RUN, **run})
    same(sampled(merged(model, **PUBLISHED), **run), wanted, plain, RUN["steps"])


@pytest.mark.parametrize("run", [{"cfg": 1.0}, {}, {"batch": 2}], ids=str)
def test_published_on_flux(models, merged, run):
    check_published_flux(models, merged, **run)


def check_unet(models, merged, name: str = "sdxl", published: bool = False, every: int = 1, **run) -> None:
    model = models[name]
    with by_hand.UNetByHand(model, published, every):
        wanted = builders.sample(model, **{**RUN, **run})
    plain = builders.sample(model, **{**RUN, **run})
    settings = PUBLISHED if published else EACH_STEP
    patched = merged(model, **{**settings, "reselect_every": every, "reweight_every": every})
    same(sampled(patched, **run), wanted, plain, RUN["steps"])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("published", [True, False], ids=["published", "rows"])
@pytest.mark.parametrize("name,run", [("sdxl", {}), ("sd15", {"cfg": 1.0, "batch": 2})], ids=["sdxl", "sd15"])
def test_unet(models, merged, name, run, published, every):
    check_unet(models, merged, name, published, every, **run)


def test_the_preset_paper_is_the_published_method():
    from comfyui_toma.toma_core.settings import PRESETS, MergeWhere

    for kind, every, skip in (("unet", (10, 5), 0), ("dit", (1, 1), 5)):
        paper = PRESETS["paper"][kind]
        assert (paper.ratio, paper.tolerance, paper.merge, paper.tile_size) == (0.5, 0, MergeWhere.LAYER, 8)
        assert (paper.reselect_every, paper.reweight_every, paper.skip_first_blocks) == (*every, skip)
        assert (paper.start_percent, paper.end_percent, paper.budget) == (0.0, 1.0, "equal")
