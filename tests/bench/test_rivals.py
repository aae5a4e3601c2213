"""The rivals' formulas, by hand on synthetic answers."""

import sys
from math import isclose
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytestmark = pytest.mark.usefixtures("comfy")
STEPS = 12


def course(step: float) -> torch.Tensor:
    """A velocity that goes along a parabola."""
    return torch.tensor([1.0 + 0.5 * step, 2.0 - 0.1 * step**2])


def told(rule, steps: int = STEPS) -> dict[int, torch.Tensor]:
    """Runs a rule over a schedule on the parabola; what it put in the place of which steps."""
    from bench.rivals.skipping import Seen

    guessed = {}
    for step in range(steps):
        sigma, x = 1 - step / steps, torch.ones(2)
        found = rule.guess(step, steps, sigma, x)
        if found is None:
            rule.saw(Seen(step, sigma, x, course(step)))
        else:
            guessed[step] = found
    return guessed


def test_taylorseer_of_first_order_is_a_line_through_the_last_two():
    from bench.rivals.taylorseer import TaylorSeer, runs

    guessed = told(TaylorSeer(1, interval=2, first=3))
    assert sorted(guessed) == [step for step in range(STEPS) if not runs(step, STEPS, 2, 3)] == [3, 5, 7, 9]
    torch.testing.assert_close(guessed[5], course(4) + (course(4) - course(2)) / 2)


def test_taylorseer_of_second_order_is_taylors_series_of_differences():
    from bench.rivals.taylorseer import TaylorSeer

    guessed = told(TaylorSeer(2, interval=3, first=3))
    assert sorted(guessed) == [3, 4, 6, 7, 9, 10]
    first = (course(5) - course(2)) / 3
    second = (first - (course(2) - course(1))) / 3
    torch.testing.assert_close(guessed[7], course(5) + 2 * first + 2 * second)


def test_taylorseers_speed():
    from bench.rivals.taylorseer import speedup

    assert isclose(speedup(20, 2, 3), 20 / 12)


def test_spectrum_grows_its_interval():
    from bench.rivals import spectrum

    ran = [step for step, runs in enumerate(spectrum.schedule(50, 1.0)) if runs]
    gaps = [b - a for a, b in zip(ran[4:-1], ran[5:-1])]
    assert ran[:5] == [0, 1, 2, 3, 4] and gaps == sorted(gaps) and gaps[0] == 2 and gaps[-1] > 5
    assert spectrum.speedup(50, 1.0) > spectrum.speedup(50, 0.0)
    assert sorted(told(spectrum.Spectrum(1.0), 50)) == [step for step in range(50) if step not in ran]


def test_spectrums_fit_is_the_ridge_regression():
    from bench.rivals import spectrum
    from bench.rivals.skipping import Seen

    rule = spectrum.Spectrum(0.0)
    for step in (0, 1, 3):
        rule.saw(Seen(step, 1.0, torch.zeros(2), course(step)))
    tau = torch.tensor([2 * step / 8 - 1 for step in (0, 1, 3)])
    design = torch.cos(torch.arange(5) * torch.acos(tau)[:, None])
    wanted = torch.cos(torch.arange(5) * torch.acos(torch.tensor(2 * 4 / 8 - 1)))
    values = torch.stack([course(step) for step in (0, 1, 3)])
    fitted = wanted @ torch.linalg.inv(design.T @ design + 0.1 * torch.eye(5)) @ design.T @ values
    torch.testing.assert_close(rule._fitted(4, 8), fitted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rule._local(4), course(3) + (course(3) - course(1)) / 2)


def test_sada_skips_where_the_error_points_against_the_second_difference():
    from bench.rivals.sada import SADA
    from bench.rivals.skipping import Seen

    def rule(bend: float) -> SADA:
        made = SADA()
        for step, velocity in enumerate((0.0, 1.0, 2.0 + bend)):
            made.saw(Seen(step, 1 - 0.1 * step, torch.zeros(1), torch.tensor([velocity])))
        return made

    for bend in (1.0, -1.0):
        slope = (5 * (2 + bend) + 5 * 1 - 4 * 0) / 6
        expected = torch.tensor([-0.1 * slope])
        assert rule(bend).guess(3, 10, 0.7, expected - 0.01 * bend) == 2 + bend
        assert rule(bend).guess(3, 10, 0.7, expected + 0.01 * bend) is None
        assert rule(bend).guess(9, 10, 0.7, expected - 0.01 * bend) is None  # the last step
        assert rule(bend).guess(4, 10, 0.6, expected - 0.01 * bend) is None  # one was skipped just now


def test_teacache_reuses_the_residual_until_its_input_has_changed():
    from bench.rivals.skipping import Seen
    from bench.rivals.teacache import TeaCache

    rule, x = TeaCache(0.25), torch.tensor([1.0])
    assert rule.guess(0, 9, 1.0, x) is None
    rule.saw(Seen(0, 1.0, x, torch.tensor([3.0])))
    torch.testing.assert_close(rule.guess(1, 9, 0.9, torch.tensor([1.1])), torch.tensor([3.1]))
    assert rule.guess(2, 9, 0.8, torch.tensor([1.32])) is None  # 10 % and 20 %


def test_tomesds_matching_as_a_merge():
    from bench.rivals.matching import tomesd
    from comfyui_toma.toma_core.tiles import Tiles

    tiles = Tiles.of(8, 8, 4)
    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1))
    merge = tomesd(tiles.split(x), 40, tiles)
    assert merge.kept.shape == (2, 40) and all(len(set(kept.tolist())) == 40 for kept in merge.kept)
    torch.testing.assert_close(merge.take(x)[1], x[1, merge.kept[1]])
    copied = merge.copied(merge.take(x))
    torch.testing.assert_close(copied[0, merge.kept[0]], x[0, merge.kept[0]])
