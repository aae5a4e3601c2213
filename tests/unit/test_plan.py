"""The error budget alone, as one would test a step-size controller: on synthetic answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import hypot, inf, nan, sin

import pytest
import torch
from comfyui_toma.toma_core.plan import FEW, PATIENCE, ErrorBudget, Kind, Moment, ReuseSchedule, moment_at
from hypothesis import given, settings
from hypothesis import strategies as st

Answer = Callable[[float], float | torch.Tensor]
NEVER, ALWAYS, FIRST_HALF = ReuseSchedule(merges=False), ReuseSchedule(), ReuseSchedule(end_percent=0.5)
STEPS = (8, 12, 20, 30, 50)


@dataclass
class Done:
    """What a run on synthetic answers did, and the image that it made."""

    kinds: list[Kind] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)
    x: torch.Tensor | float = 0.0

    def count(self, kind: Kind) -> int:
        return self.kinds.count(kind)

    @property
    def speedup(self) -> float:
        return len(self.kinds) / (len(self.kinds) - self.count(Kind.FORECAST))


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of a to b, relative to b."""
    return float((a - b).norm() / b.norm())


def continued(anchors: Sequence[tuple[float, torch.Tensor]], place: float) -> torch.Tensor:
    """The line through the last two answers."""
    if len(anchors) < 2:
        return anchors[-1][1]
    (p0, a0), (p1, a1) = anchors
    return a1 + (place - p1) / (p1 - p0) * (a1 - a0)


def flow_sigmas(steps: int) -> list[float]:
    return [1 - i / steps for i in range(steps + 1)]


def drive(plan: ErrorBudget, answer: Answer, sigmas: Sequence[float], forecasts: bool = True) -> Done:
    """An Euler sampler that takes the share `weight` of each answer into its image x."""
    done, anchors = Done(), []
    for sigma in sigmas[:-1]:
        moment = moment_at(sigma, sigmas, flow=True)
        decision = plan.next(moment, [place for place, _ in anchors])
        done.kinds.append(decision.kind)
        done.whys.append(decision.why)
        real = torch.as_tensor(answer(moment.place), dtype=torch.float64)
        given = continued(anchors, moment.place) if decision.kind is Kind.FORECAST and forecasts else real
        if decision.kind is not Kind.FORECAST:
            if anchors:
                plan.learn(far(continued(anchors, moment.place), real))
            anchors = [*anchors[-1:], (moment.place, real)]
        done.x += moment.weight * (given - done.x)
    return done


def noise(seed: int) -> Answer:
    """A sampler that adds noise: no answer tells anything of the next."""
    generator = torch.Generator().manual_seed(seed)
    return lambda place: torch.randn(64, generator=generator)


SMOOTH: dict[str, Answer] = {
    "constant": lambda p: 1.0,
    "line": lambda p: 1 + 2 * p,
    "quadratic": lambda p: 1 + p + 0.5 * p * p,
    "cubic": lambda p: 1 + p - p**2 + 0.6 * p**3,
    "wave": lambda p: 2 + 0.5 * sin(4 * p),
}


@pytest.mark.parametrize("name,steps", [("constant", n) for n in STEPS] + [("line", n) for n in (20, 30, 50)])
def test_a_line_is_forecast_far(name, steps):
    done = drive(ErrorBudget(0.03, ALWAYS), SMOOTH[name], flow_sigmas(steps))
    assert done.kinds[0] is done.kinds[-1] is Kind.FULL, "the first and the last step run"
    assert done.count(Kind.FORECAST) >= steps / 2 - 1
    assert done.count(Kind.MERGED) <= 1, "what can be forecast is not merged"


@pytest.mark.parametrize("tolerance", [0.003, 0.01, 0.03])
def test_what_bends_more_is_forecast_less(tolerance):
    bends = [lambda p, c=c: 1 + p + c * p * p for c in (0.0, 0.3, 1.0, 4.0, 16.0)]
    forecast = [drive(ErrorBudget(tolerance, NEVER), a, flow_sigmas(30)).count(Kind.FORECAST) for a in bends]
    assert forecast == sorted(forecast, reverse=True) and forecast[0] > forecast[-1], forecast


@pytest.mark.parametrize("name", SMOOTH)
def test_more_tolerance_is_more_forecasts(name):
    tolerances = (0.0, 0.001, 0.01, 0.05, 0.3)
    forecast = [
        drive(ErrorBudget(t or 1e-9, NEVER), SMOOTH[name], flow_sigmas(30)).count(Kind.FORECAST) for t in tolerances
    ]
    assert forecast[-1] > 10 and forecast[-1] >= forecast[2] >= forecast[0], forecast
    if name not in ("constant", "line"):  # those cost nothing
        assert forecast[0] == 0, forecast


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("window,kind", [(ALWAYS, Kind.MERGED), (NEVER, Kind.FULL)], ids=["window", "none"])
def test_noise_is_not_forecast_but_merged_in_the_window(steps, seed, window, kind):
    """After a few answers that could not be forecast, fewer in a short run."""
    done = drive(ErrorBudget(0.03, window), noise(seed), flow_sigmas(steps))
    known = 2 + min(PATIENCE, steps // FEW)
    assert Kind.FORECAST not in done.kinds
    assert set(done.kinds[known:-3]) == {kind}, done.kinds
    assert done.kinds[-1] is Kind.FULL


def test_very_short_runs_merge_soon():
    assert Kind.MERGED in drive(ErrorBudget(0.03, ALWAYS), noise(0), flow_sigmas(4)).kinds[:3]


def test_steps_that_can_be_forecast_end_merging():
    """Noise that turns into a line."""
    answer = noise(0)
    done = drive(
        ErrorBudget(0.1, ALWAYS), lambda p: answer(p) if p < 0.5 else torch.full((64,), 1 + p), flow_sigmas(40)
    )
    calm = done.kinds[20:]
    assert Kind.MERGED in done.kinds[:20] and Kind.FORECAST not in done.kinds[:20]
    assert Kind.FORECAST in calm and Kind.MERGED not in calm[calm.index(Kind.FORECAST) :], done.kinds


@pytest.mark.parametrize("step", [5, 4, 0])
def test_steps_back_and_within_a_step_are_counted(step):
    """A sampler that evaluates twice in a step, or goes back: no forecast is free, and nothing divides by zero."""
    plan = ErrorBudget(0.03, ALWAYS)
    for place, known in ((0.2, []), (0.25, [0.2])):
        plan.next(Moment(5, 20, place, 0.1), known)
        plan.learn(1.0)
    decision = plan.next(Moment(step, 20, 0.275, 0.1), [0.2, 0.25])
    assert decision.kind is not Kind.FORECAST
    assert isinstance(plan.learn(0.5), float)


@pytest.mark.parametrize("off", [0.0, 2e-8])
def test_the_same_sigma_again_is_not_forecast(off):
    """Also where a sampler has computed it anew, and it differs by rounding."""
    plan = ErrorBudget(0.02, NEVER)
    for step, place in enumerate((0.0, 0.05)):
        plan.next(Moment(step, 20, place, 0.05), [0.0][:step])
        plan.learn(0.0)
    again = plan.next(Moment(1, 20, 0.05 + off, 0.05), [0.0, 0.05])
    assert again.kind is Kind.FULL and "same sigma" in again.why


@pytest.mark.parametrize("noise, kind", [(0.0, Kind.FORECAST), (0.5, Kind.FULL)])
def test_noise_that_is_added_at_one_sigma_is_seen(noise, kind):
    """As in dpm_2_ancestral: to the midpoint of a step nothing is random, and the next step begins at that sigma with
    new noise. The line up to there is smooth, and a forecast across that noise is not."""
    plan = ErrorBudget(0.05, NEVER)
    for step, (place, known, error) in enumerate(((0.0, [], 0.0), (0.05, [0.0], 0.001), (0.05, [0.0, 0.05], noise))):
        plan.next(Moment(step, 20, place, 0.1), known)
        plan.learn(error)
    assert plan.next(Moment(3, 20, 0.1, 0.1), [0.0, 0.05]).kind is kind
    plan.restart()
    assert plan.floor == 0.0


def test_outside_of_the_window_noise_runs_in_full():
    done = drive(ErrorBudget(0.03, FIRST_HALF), noise(0), flow_sigmas(20))
    assert done.kinds[6:] == [Kind.MERGED] * 4 + [Kind.FULL] * 10


@pytest.mark.parametrize("steps", [20, 50])
def test_a_jump_is_answered_in_full_and_learnt(steps):
    """A line that falls in the middle: the first evaluation after it that runs grades it, and for a while nothing is
    forecast; before, nothing is known of it."""
    done = drive(ErrorBudget(0.03, NEVER), lambda p: p + (8 if p < 0.51 else 0), flow_sigmas(steps))
    smooth = drive(ErrorBudget(0.03, NEVER), lambda p: p + 8, flow_sigmas(steps))
    assert done.kinds[: steps // 2] == smooth.kinds[: steps // 2]
    graded = next(i for i, kind in enumerate(done.kinds) if i / steps > 0.51 and kind is Kind.FULL)
    assert done.kinds[graded : graded + 3] == [Kind.FULL] * 3, done.kinds
    assert done.kinds[graded:].count(Kind.FORECAST) < smooth.kinds[graded:].count(Kind.FORECAST)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("tolerance", [0.01, 0.03, 0.1])
def test_one_tolerance_is_one_closeness_whatever_the_steps(name, steps, tolerance):
    """How far the image is from that of the same run in full, relative to it."""
    answer, sigmas = SMOOTH[name], flow_sigmas(steps)
    done = drive(ErrorBudget(tolerance, NEVER), answer, sigmas)
    full = drive(ErrorBudget(tolerance, NEVER), answer, sigmas, forecasts=False)
    assert far(done.x, full.x) <= tolerance


@pytest.mark.parametrize("name", SMOOTH)
def test_the_speedup_grows_with_the_steps(name):
    speed = [drive(ErrorBudget(0.03, NEVER), SMOOTH[name], flow_sigmas(steps)).speedup for steps in STEPS]
    assert speed[-1] > 1.5 and speed[-1] > speed[0] and all(b > 0.8 * a for a, b in zip(speed, speed[1:])), speed


@given(st.integers(0, 10**6), st.sampled_from(STEPS), st.floats(1e-4, 1), st.booleans())
@settings(max_examples=50)
def test_what_forecasts_are_expected_to_cost_never_exceeds_the_tolerance(seed, steps, tolerance, restarts):
    """Whatever the grades are: errors of one interval add up, those of different ones by their squares."""
    plan, places, draw, intervals = ErrorBudget(tolerance, ALWAYS), [], random.Random(seed), [0.0]
    sigmas = flow_sigmas(steps)
    for i, sigma in enumerate(sigmas[:-1]):
        moment = moment_at(sigma, sigmas, flow=True)
        if restarts and i == steps // 2:
            places = []
            plan.restart()
        if plan.next(moment, places).kind is Kind.FORECAST:
            intervals[-1] = plan.cost
        else:
            intervals.append(0.0)
            plan.learn(draw.choice((0.0, 0.01, 0.1, 1.0)) * draw.random())
            places = [*places[-1:], moment.place]
    assert hypot(*intervals) <= tolerance * (1 + 1e-9)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_same_inputs_make_the_same_plan(name):
    one, two = (drive(ErrorBudget(0.02, ALWAYS), SMOOTH[name], flow_sigmas(25)) for _ in range(2))
    assert one == two


def test_it_never_forecasts_further_than_was_seen():
    """Answers that lie close together say little of what is far away, however well they were met."""
    plan = ErrorBudget(0.02, NEVER)
    plan.next(Moment(0, 20, 0.0, 0.05), [])
    plan.next(Moment(1, 20, 0.01, 0.05), [0.0])
    plan.learn(0.0)
    assert plan.next(Moment(2, 20, 0.024, 0.05), [0.0, 0.01]).kind is Kind.FORECAST
    far = plan.next(Moment(3, 20, 0.026, 0.05), [0.0, 0.01])
    assert far.kind is Kind.FULL and "too far" in far.why


def test_after_a_restart_nothing_is_forecast_before_a_grade():
    plan, line = ErrorBudget(0.02, NEVER), [0.0, 0.05]
    for place in (0.0, 0.05):
        plan.next(Moment(0, 20, place, 0.05), line[: int(place > 0)])
        plan.learn(0.0)
    assert plan.next(Moment(2, 20, 0.1, 0.05), line).kind is Kind.FORECAST
    plan.restart()
    assert plan.next(Moment(3, 20, 0.15, 0.05), []).kind is Kind.FULL
    assert plan.next(Moment(4, 20, 0.2, 0.05), [0.15]).kind is Kind.FULL
    plan.learn(0.0)
    assert plan.next(Moment(5, 20, 0.25, 0.05), [0.15, 0.2]).kind is Kind.FORECAST


@pytest.mark.parametrize("error", [inf, nan])
def test_a_grade_that_is_no_number_ends_forecasting(error):
    plans = [ErrorBudget(0.5, NEVER) for _ in range(2)]
    for plan, grade in zip(plans, (0.0, error)):
        plan.next(Moment(0, 20, 0.0, 0.05), [])
        assert plan.next(Moment(10, 20, 0.5, 0.5), [0.0]).kind is Kind.FULL
        plan.learn(grade)
    kinds = [plan.next(Moment(11, 20, 0.55, 0.05), [0.0, 0.5]).kind for plan in plans]
    assert kinds == [Kind.FORECAST, Kind.FULL]


def test_a_grade_is_told_in_times_of_what_was_allowed():
    """Of an evaluation at a quarter of the schedule: tolerance * sqrt(1 / 4) was allowed there."""
    plan = ErrorBudget(0.1, NEVER)
    assert plan.learn(1.0) is None, "nothing ran yet"
    plan.next(Moment(0, 20, 0.0, 0.05), [])
    plan.next(Moment(4, 20, 0.2, 0.2), [0.0])
    assert plan.learn(0.5) == pytest.approx(0.2 * 0.5 / (0.1 * 0.25**0.5))


@pytest.mark.parametrize("window", [ALWAYS, NEVER])
def test_a_single_step_runs(window):
    assert drive(ErrorBudget(1.0, window), SMOOTH["line"], [1.0, 0.0]).kinds == [Kind.FULL]


def test_the_last_step_is_computed_also_of_a_schedule_that_ends_early():
    """As one half of a run in two samplers: the next one gets the latent, and nothing corrects it."""
    sigmas = flow_sigmas(40)[:21]
    done = drive(ErrorBudget(1.0, NEVER), lambda place: torch.tensor([1.0, place]), sigmas)
    assert done.kinds[-1] is Kind.FULL and done.whys[-1] == "near the end of the run"
    assert done.count(Kind.FORECAST) > 10


def test_a_step_that_removes_much_of_the_noise_is_computed_and_says_so():
    """As all steps of a short karras schedule do."""
    sigmas = [0.99, 0.97, 0.95, 0.4, 0.36, 0.33, 0.3]
    done = drive(ErrorBudget(1.0, NEVER), lambda place: torch.tensor([1.0, place]), sigmas)
    assert done.kinds[2] is Kind.FULL and done.whys[2] == "this step removes too much noise at once"
    assert done.count(Kind.FORECAST) > 0
