"""Every case of the table, sampled by ComfyUI unmerged and merged."""

import builders
import pytest
import setups
import torch
from cases import CASES
from told import flops_saved, report

STEPS, RATIOS = 3, (0.25, 0.75)


def arguments(case, model):
    run = dict(case.run)
    width, height = run.setdefault("width", 128), run.setdefault("height", 128)
    positive, negative = getattr(setups, case.conds)(model, width, height)
    if run.get("latent") == "noise":
        shape = builders.empty_latent(model, width, height, run.get("batch", 1)).shape
        run["latent"] = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    if run.pop("noise_mask", False):
        run["noise_mask"] = torch.zeros(1, 1, height, width)
        run["noise_mask"][..., : width // 2] = 1
    return {"steps": STEPS, "positive": positive, "negative": negative, **run}


@pytest.mark.parametrize("case,name", [pytest.param(c, n, id=f"{c.name}-{n}") for c in CASES for n in c.models])
def test_case(models, merged, case, name):
    model = models[name]
    kwargs = arguments(case, model)
    before = builders.sample(model, **kwargs)
    distances = []
    for ratio in RATIOS:
        patched = merged(model, ratio=ratio, reselect_every=2)
        out = builders.sample(patched, **kwargs)
        assert out.shape == before.shape
        assert torch.isfinite(out).all()
        distances.append(((out - before).norm() / before.norm()).item())
        told = report(patched)
        if case.merges:
            assert told.blocks_merged == told.blocks and 2 * told.kinds.count("merged") >= len(told.kinds)
            assert told.tokens and all(after == max(1, round((1 - ratio) * n)) for n, after in told.tokens.values())
            assert 0 < flops_saved(told) < 1
            assert not told.notes
        else:
            assert not told.tokens and set(told.kinds) == {"full"}
            assert told.notes or told.evaluations[0].why == "no tokens were merged here"
            assert torch.equal(out, before)
    if case.merges:
        assert 0 < distances[0] < distances[1] < case.far, distances
        assert torch.equal(out, builders.sample(patched, **kwargs)), "a repeated run differs"


FORECAST = [case for case in CASES if "width" not in case.run]


@pytest.mark.parametrize("case,name", [pytest.param(c, n, id=f"{c.name}-{n}") for c in FORECAST for n in c.models])
def test_forecast_case(models, merged, case, name):
    """The same with steps that are forecast, of the small ones."""
    model = models[name]
    kwargs = {**arguments(case, model), "width": 64, "height": 64, "steps": 7}
    if case.conds in ("attention_mask", "control", "reference") or "latent" in case.run:
        kwargs = {**arguments(case, model), "steps": 7}
    if case.run.get("steps") == 1:
        kwargs["steps"] = 1
    before = builders.sample(model, **kwargs)
    patched = merged(model, ratio=0.0, tolerance=0.9)
    out = builders.sample(patched, **kwargs)
    told = report(patched)
    assert out.shape == before.shape and torch.isfinite(out).all()
    assert told.kinds[0] == told.kinds[-1] == "full"
    if kwargs["steps"] == 1:
        assert torch.equal(out, before)
        return
    assert told.counts["forecast"] > 0 and not told.notes, told.sentence()
    assert 0 < (out - before).norm() < case.far * before.norm()
    assert torch.equal(out, builders.sample(patched, **kwargs)), "a repeated run differs"
