"""Nodes of other packs that run code of their own in the place of a DiT's blocks."""

from functools import partial

import builders
import pytest
import torch
from calling import FORECAST, MERGED, RUN, says_what_it_did, told, toma
from composing import far


def in_every_block(model, slot):
    model = model.clone()
    for kind in ("double_block", "single_block"):
        for i in range(2):
            model.set_model_patch_replace(partial(slot, (kind, i)), "dit", kind, i)
    return model


@pytest.mark.parametrize("first", [True, False], ids=["before ToMA", "after ToMA"])
def test_a_foreign_slot_in_every_block(bench, first):
    """Spectrum keeps the features of all tokens there: it always sees them all."""
    seen = set()

    def slot(where, args, extra):
        seen.add(args["img"].shape[1])
        return extra["original_block"](args)

    model = bench.models["flux"]
    patched = toma(in_every_block(model, slot), **MERGED) if first else in_every_block(toma(model, **MERGED), slot)
    assert torch.equal(builders.sample(patched, **RUN), builders.sample(model, **RUN))
    assert seen == {64, 64 + builders.TEXT_TOKENS}
    assert told(patched).notes == [
        "tokens are not merged: another node runs code of its own in the place of double_block 0"
    ]


@pytest.mark.parametrize("settings", [FORECAST, MERGED], ids=["forecast", "merged"])
@pytest.mark.parametrize("first", [True, False], ids=["before ToMA", "after ToMA"])
def test_a_cache_in_every_block(bench, first, settings):
    """Spectrum counts the guider's answers and skips the blocks at every second one. What it gives there is no answer
    to forecast from: forecasts in the place of all the others would leave it nothing that was computed."""
    from comfy.patcher_extension import WrappersMP

    kept, asked, skips = [], [], []

    def slot(where, args, extra):
        if skips[-1]:
            return {**args, "img": kept[-1]} if where == ("single_block", 1) else dict(args)
        out = extra["original_block"](args)
        if where == ("single_block", 1):
            kept.append(out["img"])
        return out

    def step(executor, *args, **kwargs):
        skips.append(len(asked) > 2 and len(asked) % 2 == 1)
        asked.append(1)
        return executor(*args, **kwargs)

    def theirs(model):
        model = in_every_block(model, slot)
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "cache", step)
        return model

    model, run = bench.models["flux"], {"steps": 12, "cfg": 2.0}
    alone = builders.sample(theirs(model), **run)
    asked.clear()
    skips.clear()
    patched = toma(theirs(model), **settings) if first else theirs(toma(model, **settings))
    out, report = builders.sample(patched, **run), told(patched)
    if settings is FORECAST:
        answered = [e.step for e in report.evaluations if "another node answered" in e.why]
        assert answered == [i for i, skip in enumerate(skips) if skip]
        kinds = report.kinds
        assert not any(kinds[i] == "forecast" for step in answered for i in range(step, min(step + 3, 12)))
        assert far(out, alone) < 0.1
    else:
        assert torch.equal(out, alone)
    says_what_it_did(report)


def test_a_block_that_is_always_left_out(bench):
    """It is not run, but the model still answers: that is forecast."""

    def slot(where, args, extra):
        return dict(args) if where == ("double_block", 1) else extra["original_block"](args)

    patched = toma(in_every_block(bench.models["flux"], slot), **FORECAST)
    builders.sample(patched, **RUN)
    assert told(patched).counts["forecast"]
    assert not any("another node answered" in evaluated.why for evaluated in told(patched).evaluations)


def test_answers_of_a_cache_are_no_measure_of_full_ones():
    from comfyui_toma.toma_core.patcher.report import ANSWERED, Evaluated, Report
    from comfyui_toma.toma_core.settings import Settings

    def evaluated(kind, seconds, why=""):
        return Evaluated(0, 1.0, kind, why, seconds=seconds)

    computed, cached, forecast = evaluated("full", 2.0), evaluated("full", 0.1, ANSWERED), evaluated("forecast", 0.1)
    evaluations = [computed] * 3 + [cached] * 3 + [forecast] * 3
    report = Report("flux", Settings(), 0, evaluations=evaluations)
    assert report.measured_speedup == pytest.approx(2.0 * 8 / 4.6)
