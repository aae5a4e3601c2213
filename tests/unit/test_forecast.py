"""Answers continued and corrected, on bare tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
from comfyui_toma.toma_core.forecast import CORRECTED, GAIN, MOST, Forecast
from comfyui_toma.toma_core.plan import ErrorBudget, Kind, Moment, ReuseSchedule, moment_at
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPE = (2, 4, 6, 5)


def drawn(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def line(seed: int = 0, dtype=torch.float64):
    """An answer that moves along a line."""
    a, b = drawn(seed=seed), drawn(seed=seed + 1)
    return lambda place: (a + place * b).to(dtype)


def observed(answer, places, gain: float = 1.0, learning: float = 0.0) -> Forecast:
    forecast = Forecast(gain, learning)
    for place in places:
        forecast.observe(place, answer(place))
    return forecast


@pytest.mark.parametrize("places", [(0.0, 0.1), (0.2, 0.25), (0.0, 0.1, 0.3, 0.35)])
@pytest.mark.parametrize("at", [0.4, 0.9, 1.0])
def test_a_line_is_continued_exactly(places, at):
    answer = line()
    forecast = observed(answer, places)
    assert forecast.places == places[-2:]
    assert torch.allclose(forecast.at(at), answer(at), atol=1e-12)
    assert torch.allclose(forecast.at(places[-1]), answer(places[-1]), atol=1e-12)


def test_damped_it_goes_that_share_of_the_way():
    answer = line()
    forecast = observed(answer, (0.0, 0.25), gain=0.8)
    assert torch.allclose(forecast.at(0.5), answer(0.45), atol=1e-6)  # a gain is fp32
    assert 0 < GAIN <= 1


@pytest.mark.parametrize("share,gain", [(0.6, 0.6), (0.0, 0.0), (-0.5, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_gain_is_learnt_from_what_came_true(share, gain, dtype):
    """Each answer goes on by that share of the line to it."""
    answers, places = [drawn(), drawn(seed=1)], [0.0, 0.1]
    for place in (0.15, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9):
        line = (answers[-1] - answers[-2]) * (place - places[-1]) / (places[-1] - places[-2])
        answers.append(answers[-1] + share * line)
        places.append(place)
    forecast, grades = Forecast(), []
    for place, answer in zip(places, answers):
        grades.append(forecast.observe(place, answer.to(dtype)))
    assert grades[0] is None and float(grades[1][1]) == GAIN, "two answers make a line, and tell nothing of it"
    assert float(grades[-1][1]) == pytest.approx(gain, abs=0.01)
    ahead = (1.0 - places[-1]) / (places[-1] - places[-2])
    wanted = answers[-1] + float(grades[-1][1]) * ahead * (answers[-1] - answers[-2])
    assert torch.allclose(
        forecast.at(1.0).double(), wanted, atol=30 * torch.finfo(dtype).eps * float(wanted.abs().max())
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_wavers_does_not_lessen_the_gain(seed):
    """Answers on a straight line, each with noise of its own, as large as a step: all of the line comes true.
    Least squares along the line, (a2 - a1) . (a1 - a0) / |a1 - a0|^2, would say that none of it does."""
    along, places = drawn(seed=seed), [step / 10 for step in range(10)]
    answers = [10 * place * along + drawn(seed=100 + 10 * seed + i) for i, place in enumerate(places)]
    forecast = Forecast()
    gains = [forecast.observe(place, answer) for place, answer in zip(places, answers)]
    assert float(gains[-1][1]) > 0.8
    before, last, after = answers[-3:]
    assert ((after - last) * (last - before)).sum() / (last - before).square().sum() < 0.35


def test_what_does_not_move_leaves_a_gain():
    forecast = observed(lambda place: torch.ones(SHAPE), (0.0, 0.1, 0.2, 0.3), learning=0.5)
    assert 0 <= float(forecast.gain) <= 1 and torch.equal(forecast.at(0.9), torch.ones(SHAPE))


def test_the_same_place_again_teaches_no_gain():
    forecast = observed(line(), (0.0, 0.1, 0.2), learning=0.5)
    before = float(forecast.gain)
    forecast.observe(0.2, drawn(seed=7))
    assert float(forecast.gain) == before


def test_one_answer_is_held():
    answer = line()
    forecast = observed(answer, [0.3])
    assert torch.equal(forecast.at(0.9), answer(0.3))


def test_nothing_is_graded_before_there_is_an_answer():
    assert Forecast().observe(0.0, drawn()) is None
    assert Forecast().places == ()


def test_a_grade_is_the_relative_error_of_the_forecast_in_its_place():
    answer = line()
    forecast = observed(answer, (0.0, 0.25))
    real = answer(0.5) + drawn(seed=5)
    grade = forecast.observe(0.5, real)
    assert grade.shape == (2,) and grade.dtype is torch.float32
    assert float(grade[0]) == pytest.approx(float(drawn(seed=5).norm() / real.norm()), rel=1e-5)
    assert float(observed(answer, [0.25]).observe(0.5, answer(0.5))[0]) == pytest.approx(
        float((answer(0.5) - answer(0.25)).norm() / answer(0.5).norm()), rel=1e-5
    )


def test_the_grade_of_nothing_is_a_number():
    forecast = observed(lambda place: torch.zeros(SHAPE), (0.0, 0.1))
    assert torch.isfinite(forecast.observe(0.2, torch.zeros(SHAPE))).all()


@pytest.mark.parametrize("off", [0.0, 2e-8])
def test_the_same_place_twice_counts_once(off):
    """As samplers do that evaluate again where they have arrived: the later answer stands, the one before stays."""
    answer = line()
    forecast = observed(answer, (0.0, 0.25))
    again = answer(0.25) + 1
    assert torch.equal(forecast.corrected(0.25 + off, 0.1, again), again)
    forecast.observe(0.25 + off, again)
    assert forecast.places == (0.0, 0.25 + off)
    assert torch.allclose(forecast.at(0.5), 2 * again - answer(0.0))
    forecast = observed(answer, [0.25, 0.25])
    assert forecast.places == (0.25,) and torch.isfinite(forecast.at(0.5)).all()


def test_two_places_in_one_step_and_a_step_back():
    """A midpoint, and a sampler that returns to where the step began: finite, and the last answer is the anchor."""
    answer = line()
    forecast = observed(answer, (0.0, 0.1, 0.05))
    assert forecast.places == (0.0, 0.05) and torch.allclose(forecast.at(0.2), answer(0.2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_is_kept_and_is_enough(dtype):
    answer = line(dtype=dtype)
    forecast = observed(answer, (0.0, 0.25))
    assert forecast.at(0.5).dtype is dtype is forecast.give(0.5, 0.2).dtype
    assert torch.allclose(forecast.at(0.5).double(), line()(0.5), atol=20 * torch.finfo(dtype).eps)
    corrected = forecast.corrected(0.75, 0.3, answer(0.75))
    assert corrected.dtype is dtype
    exact = observed(line(), (0.0, 0.25))
    exact.give(0.5, 0.2)
    wanted = exact.corrected(0.75, 0.3, line()(0.75))
    assert torch.allclose(corrected.double(), wanted, atol=100 * torch.finfo(dtype).eps)
    assert not torch.allclose(wanted, line()(0.75), atol=0.1), "there was something to correct"


def test_a_grade_in_half_precision_does_not_overflow():
    large = torch.full((1, 4, 64, 64), 200.0, dtype=torch.float16)  # its square norm is past 65504
    error, gain = observed(lambda place: large, (0.0, 0.1), learning=0.5).observe(0.2, large * 1.5).tolist()
    assert 0 <= gain <= 1 and error == pytest.approx(1 / 3, rel=1e-2)


def test_what_is_given_out_is_its_own():
    """A sampler may write into what it gets, and into what it gave."""
    answer = drawn()
    forecast = Forecast(1.0)
    for place in (0.0, 0.1):
        given = answer.clone()
        forecast.observe(place, given)
        given.zero_()
        before = forecast.at(0.2)
        forecast.at(0.2).zero_()
        forecast.give(0.2, 0.1).zero_()
        assert torch.equal(forecast.at(0.2), before) and before.abs().sum() > 0
    computed = drawn(seed=3)
    forecast.corrected(0.3, 0.2, computed).zero_()
    assert torch.equal(computed, drawn(seed=3)), "the computed answer is taken in after it was corrected"
    assert torch.allclose(forecast.at(0.2), answer)


def test_forgotten_is_as_new():
    forecast = observed(line(), (0.0, 0.1))
    forecast.give(0.2, 0.1)
    forecast.forget()
    real = drawn()
    assert forecast.places == () and forecast.corrected(0.3, 0.1, real) is real
    assert forecast.observe(0.3, real) is None and torch.equal(forecast.at(0.5), real)


def test_forgotten_is_the_gain_too():
    forecast = observed(line(), (0.0, 0.1, 0.2, 0.3), gain=0.25, learning=0.5)
    assert float(forecast.gain) > 0.5
    forecast.forget()
    assert forecast.gain == 0.25


# --------------------------------------------------------------------------- the correction


def sampled(answer, sigmas: list[float], forecast_steps: set[int], gain: float = 1.0, correct: bool = True):
    """Euler over a flow's schedule, x <- x + weight * (answer - x), with these steps forecast."""
    forecast, x = Forecast(gain, learning=0.0), torch.zeros(SHAPE, dtype=torch.float64)
    for step, sigma in enumerate(sigmas[:-1]):
        moment = moment_at(sigma, sigmas, flow=True)
        if step in forecast_steps:
            given = forecast.give(moment.place, moment.weight)
        else:
            real = answer(moment.place)
            given = forecast.corrected(moment.place, moment.weight, real) if correct else real
            forecast.observe(moment.place, real)
        x = x + moment.weight * (given - x)
    return x


@pytest.mark.parametrize("steps,left", [(10, 0.35), (40, 0.09), (200, 0.02)])
@pytest.mark.parametrize("forecasts", [1, 2])
@pytest.mark.parametrize("gain", [0.0, 0.8])
def test_what_forecasts_got_wrong_is_undone_by_the_next_answer(gain, forecasts, steps, left):
    """The answer comes on as it would with a velocity that changes evenly, so that forecasts are off by what the next
    answer shows. The image right after it, in the middle of the run: what stays is what is not corrected, and of the
    rest the order of a step's weight."""
    middle = steps // 2
    last, start, way = (middle - forecasts - 1) / steps, drawn(), drawn(seed=1)

    def answer(place: float) -> torch.Tensor:
        return start + (place - last) * (1 - place) * way

    sigmas = [1 - i / steps for i in range(steps + 1)][: middle + 2]  # ends after the step at `middle`
    which = set(range(middle - forecasts, middle))
    full = sampled(answer, sigmas, set())
    cost = (sampled(answer, sigmas, which, gain, correct=False) - full).norm()
    assert (sampled(answer, sigmas, which, gain) - full).norm() < (1 - CORRECTED + left) * cost
    assert cost > 0.05 / steps**2


def test_the_correction_by_its_formula():
    answer = line()
    forecast = observed(answer, (0.0, 0.2), gain=0.5)
    a0, a1 = answer(0.0), answer(0.2)
    for place, weight in ((0.3, 0.2), (0.4, 0.25)):
        forecast.give(place, weight)
    a2, p2, weight = drawn(seed=9), 0.5, 0.3
    errors = torch.zeros_like(a0)
    for place, w in ((0.3, 0.2), (0.4, 0.25)):
        was = a1 + 0.5 * (place - 0.2) / 0.2 * (a1 - a0)
        share = min(1, (place - 0.2) * (1 - place) / ((p2 - 0.2) * (1 - p2)))
        came = a1 + share * (a2 - a1)
        errors += w * (was - came)
    share = CORRECTED * min(1 / weight, MOST / 0.25)
    assert torch.allclose(forecast.corrected(p2, weight, a2), a2 - share * errors, atol=1e-12)


def test_nothing_to_correct():
    forecast = observed(line(), (0.0, 0.2))
    real = drawn(seed=3)
    assert forecast.corrected(0.3, 0.1, real) is real, "nothing was forecast"
    forecast.give(0.3, 0.1)
    assert forecast.corrected(0.2, 0.1, real) is real, "not ahead of the last answer"
    forecast.observe(0.4, real)
    assert forecast.corrected(0.5, 0.1, real) is real, "its errors were told already"


def test_no_answer_between_two_is_taken_for_one_beyond_them():
    """Near the end of the schedule, where the formula alone would say so."""
    forecast = observed(lambda place: torch.zeros(SHAPE), [0.5])
    forecast.give(0.75, 0.2)
    real = torch.ones(SHAPE)
    assert torch.allclose(forecast.corrected(0.97, 0.2, real), real + CORRECTED)


def test_a_correction_is_bounded_where_weights_fall_steeply():
    """Errors of a heavy step must not be paid back by a light one that multiplies them."""
    a1, real = torch.zeros(SHAPE), torch.ones(SHAPE)
    forecast = observed(lambda place: a1, [0.0])
    forecast.give(0.5, 0.5)
    assert (forecast.corrected(1.0, 1e-4, real) - real).abs().max() <= MOST + 1e-6


# --------------------------------------------------------------------------- memory


class Alive(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive, at their most."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen = {other.untyped_storage()._cdata for other in others}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.drop, key, size)
        return out

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_at_most_five_latents(dtype):
    """At any time of a run, what is handed out and worked with included: counted in latents of fp32."""
    latent = torch.empty(1, 16, 64, 64, dtype=dtype, device="meta")
    given = [torch.empty_like(latent) for _ in range(12)]
    with Alive(*given) as alive:
        forecast = Forecast()
        for step, answer in enumerate(given):
            place = step / 12
            if step % 3 == 2:
                out = forecast.give(place, 0.1)
            else:
                out = forecast.corrected(place, 0.1, answer)
                forecast.observe(place, answer)
            del out
    assert 2 * latent.nbytes <= alive.most <= 5 * latent.numel() * 4, alive.most / (latent.numel() * 4)
    assert alive.now <= 3 * latent.nbytes
    forecast.forget()
    assert alive.now <= latent.nbytes


def test_places_of_answers_only_grow():
    """Between two answers at nearly one place no line can be told."""
    forecast, plan = Forecast(), ErrorBudget(0.1, ReuseSchedule())
    for place in (0.3, 0.5, 0.5 + 5e-7, 0.5):
        grade = forecast.observe(place, drawn() * place)
        assert plan.next(Moment(2, 9, place, 0.1), forecast.places).kind is Kind.FULL
        if grade is not None:
            plan.learn(*grade.tolist())
    assert forecast.places == (0.3, 0.5)
