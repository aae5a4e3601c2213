"""One image by several samplers: two models one after the other, a schedule in two parts, a refiner. What one sampler
has learnt is none of the next one's business."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from told import report

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

STEPS = 20
PAIRS = [
    ("wan21_t2v", "wan21_bernini"),  # Wan 2.2: one model for high noise, one for low
    ("z_image", "z_image"),  # SplitSigmas
    ("sdxl", "sdxl_refiner"),
]
PAIRS = [pair for pair in PAIRS if set(pair) <= set(tiny_models.available())]
SETTINGS = [{"ratio": 0.5, "tolerance": 0.0}, {"ratio": 0.5, "tolerance": 0.5}]


def part(name: str, model, latent, first: int, end: int):
    """Steps first to end - 1 of the schedule, as KSamplerAdvanced samples them."""
    import comfy.sample

    case = tiny_models.CASES[name]
    noise = comfy.sample.prepare_noise(latent, 0) if first == 0 else torch.zeros_like(latent)
    return comfy.sample.sample(
        model, noise, STEPS, case.cfg, "euler", "simple", tiny_models.conditioning(case, 1),
        tiny_models.conditioning(case, 2), latent, disable_noise=first > 0, start_step=first, last_step=end,
        force_full_denoise=end == STEPS, disable_pbar=True, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=["merged", "forecast"])
@pytest.mark.parametrize("names", PAIRS, ids=" then ".join)
def test_each_sampler_has_a_history_of_its_own(comfy, names, settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    models = {name: tiny_models.build(name) for name in names}

    def patched(name: str):
        return patch(models[name], Settings(reselect_every=1, **settings))

    first, second = (patched(name) for name in names) if names[0] != names[1] else [patched(names[0])] * 2
    half = STEPS // 2
    middle = part(names[0], first, tiny_models.empty_latent(tiny_models.CASES[names[0]]), 0, half)
    early = report(first)
    done = part(names[1], second, middle, half, STEPS)
    late = report(second)

    kind = "forecast" if settings["tolerance"] else "merged"
    assert early is not late and early.steps == late.steps == half
    assert "forecast" not in (early.kinds[0], late.kinds[0])
    # what forecasts got wrong is corrected before the latent goes on to the next sampler
    assert early.kinds[-1] != "forecast" and (kind == "merged" or early.evaluations[-1].why.startswith("near the end"))
    assert early.counts[kind] and late.counts[kind]
    assert done.isfinite().all()
    assert torch.equal(done, part(names[1], patched(names[1]), middle, half, STEPS)), "as if nothing had been before"
    plain = part(names[1], models[names[1]], middle, half, STEPS)
    assert not torch.equal(done, plain)
    assert torch.equal(plain, part(names[1], models[names[1]], middle, half, STEPS)), "something was left behind"
