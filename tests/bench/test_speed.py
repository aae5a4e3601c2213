"""The accounts of the speed benchmark, on samples whose answer is known; and that it runs, at a small size."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fullsize


@pytest.fixture
def account(comfy):
    from speedlib import account

    return account


def test_the_whole_flux_from_a_few_blocks(account):
    none = {"double": 4.0, "single": 4.0, "outside": 1.0, "step": 9.0}  # two double, four single blocks
    mine = {"double": 2.0, "single": 2.0, "outside": 2.0, "step": 6.0}
    assert account.flux_step(none, (2, 4)) == 1 + 19 * 2 + 38 * 1
    assert account.flux_speedup([mine], [none], (2, 4)) == pytest.approx(77 / (2 + 38))


def test_the_whole_unet_from_its_rows(account):
    rows = {640: ([{"row": 1.0}], [{"row": 2.0}]), 1280: ([{"row": 1.0}], [{"row": 2.0}])}
    counted = fullsize.parts("unet")
    share = sum(fullsize.share(counted, f"blocks of {c}") for c in rows)
    assert account.unet_speedup(rows) == pytest.approx(1 / (1 - share / 2))


def test_presets_by_the_steps_that_a_run_had(account):
    row = {"regime": "flux-8", "method": "turbo", "held_out": True, "kinds": "FMSMSFFF", "settings": {"ratio": 0.5}}
    found = account.presets([row, {**row, "method": "paper"}], {("flux", 0.5): 2.0}, ["turbo"])
    assert found == [{"regime": "flux-8", "preset": "turbo", "speedup": 8 / 5}]
    steps = [{"family": "unet", "method": "ToMA 0.5", "ratio": 0.5, "speedup": 1.6, "ideal": 1.66}]
    text = account.markdown(steps, found)
    assert "| ToMA 0.5 | 1.60x (by FLOPs 1.66x) |  |" in text and "| flux-8 | 1.60x |" in text


@pytest.mark.parametrize("family", ["flux", "unet"])
def test_a_sample(comfy, family):
    from speedlib import measure, methods, models

    model = models.flux(1, 1) if family == "flux" else models.one_row_unet(640, 1)
    for method in (methods.none(), methods.toma(0.5, family), methods.shorter(0.5)):
        found = measure.sample(method.make(model), (128, 128), method.steps)
        parts = ("double", "single") if family == "flux" else ("row",)
        assert all(found[part] > 0 for part in parts)
        assert found["step"] == pytest.approx(found["outside"] + sum(found[part] for part in parts))
