"""Which kind of step comes next: by the reuse schedule, or by the error budget.

A step is full, merged or forecast. Both plans are asked before each evaluation of the guider, `next(moment, places)`,
and told afterwards how wrong the forecast in its place would have been, `learn(error, gain)`. They know numbers only.

The reuse schedule: of S steps, step s is active if start <= s / S and (s + 1) / S <= end, so that an end before 100 %
leaves the last step alone, however few there are. Active steps are merged. Of the merged ones every
`reselect_every`-th reselects; of the others, every `reweight_every`-th since then reweights; the rest reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor, inf, isfinite
from typing import Protocol

END = 0.45  # a step that removes more of the remaining noise than this is not forecast: too few are left to correct it
REACH = 1.5  # a forecast may go so many times as far as the last two answers are apart, however small the errors
SLOW = 0.5  # an error estimate falls by no more than this factor at a time
PATIENCE = 3  # answers in a row of which not even the next step could be forecast, before steps are merged
FEW = 6  # a run of fewer than PATIENCE * FEW steps waits for steps // FEW answers only, below FEW steps for none
UNKNOWN = "how wrong a forecast would be is not known yet"
OFF = "would be off by"  # in those reasons below that another tolerance would change
SAME = 1e-6  # places no further apart are one: sigmas that a sampler computes twice differ by rounding


class Kind(str, Enum):
    FULL = "full"
    MERGED = "merged"
    FORECAST = "forecast"


class Action(str, Enum):
    """What a merged step does about its destinations and weights."""

    NONE = "none"
    RESELECT = "reselect"
    REWEIGHT = "reweight"
    REUSE = "reuse"


@dataclass(frozen=True)
class Moment:
    """One evaluation on the schedule. `place` runs from 0, pure noise, to 1; `weight` is the share of the remaining
    noise that this step removes, and so the share of its answer that the sampler takes in."""

    step: int
    steps: int
    place: float
    weight: float


@dataclass(frozen=True)
class Decision:
    kind: Kind
    why: str


class Plan(Protocol):
    def next(self, moment: Moment, places: Sequence[float]) -> Decision:
        """The kind of this evaluation. `places` are those of the answers that it could be forecast from."""

    def learn(self, error: float, gain: float = 1.0) -> float | None:
        """Takes the relative error of the forecast for the last evaluation that ran, and the gain of the next ones.
        Returns what that forecast would have cost, weight * error, in times of what was allowed there."""

    def restart(self) -> None:
        """What was learnt so far does not hold from here on."""


@dataclass(frozen=True)
class ReuseSchedule:
    """Merged at every step of the window, with destinations and weights that are reused. Nothing is forecast."""

    reselect_every: int = 10
    reweight_every: int = 5
    start_percent: float = 0.0
    end_percent: float = 1.0
    merges: bool = True

    def span(self, steps: int) -> tuple[int, int]:
        """The first active step and the one after the last."""
        # 0.6 * 20 and 0.35 * 20 must not miss a step for the last bit of a float
        return ceil(self.start_percent * steps - 1e-6), floor(self.end_percent * steps + 1e-6)

    def active(self, step: int, steps: int) -> bool:
        first, end = self.span(steps)
        return self.merges and first <= step < end

    def turns(self, merged: int) -> tuple[int, int]:
        """The merged steps, counted from 0, at which the destinations and the weights of that one are computed."""
        selected = merged - merged % self.reselect_every
        return selected, merged - (merged - selected) % self.reweight_every

    def next(self, moment: Moment, places: Sequence[float]) -> Decision:
        if self.active(moment.step, moment.steps):
            return Decision(Kind.MERGED, "inside the merge window")
        return Decision(Kind.FULL, "outside the merge window" if self.merges else "nothing is merged")

    def learn(self, error: float, gain: float = 1.0) -> None:
        return None

    def restart(self) -> None:
        pass


class ErrorBudget:
    """Forecasts as much as the tolerance allows, like the step-size controller of an ODE solver.

    A forecast that is off by e changes the image by about weight * e. The n forecasts between two computed answers err
    in the same direction, so their errors add up. Each error also moves the latent that the next forecast is used for,
    which is counted as a factor n. Errors of different intervals are independent: their squares add up. Steps are
    forecast while what their interval costs stays within its share of the schedule:

        n * sum over the interval of weight * e  <=  tolerance * sqrt(steps of the interval / steps of the run)

    All intervals together then cost no more than the tolerance, however many steps the run has. e is not known before,
    but every evaluation that runs shows the error of the forecast that would have stood in its place, and the error
    grows with the distance as `_distance` says.

    What may not be forecast runs in full. Where not even the step after a computed answer could be forecast, PATIENCE
    times in a row (a sampler that adds noise, high guidance, few steps), steps inside the merge window are merged; in a
    run of fewer than FEW steps at once.
    """

    def __init__(self, tolerance: float, window: ReuseSchedule) -> None:
        self.tolerance = tolerance
        self.window = window
        self.cost = 0.0  # of the forecasts since the last answer that was computed
        self.since = 0  # the step of that answer
        self.rate = inf  # error / distance (see _distance); infinite until a grade has shown it
        self.gain = 0.0  # of the forecasts, see forecast.py
        self.floor = 0.0  # error at no distance: a sampler that evaluates a sigma twice may add noise in between
        self.refused = 0  # computed answers in a row of which not even the next step could be forecast
        self.graded: tuple[float, float, float] | None = None  # distance, weight and allowance of the last evaluation

    def next(self, moment: Moment, places: Sequence[float]) -> Decision:
        self.since = min(self.since, moment.step)  # some samplers go back
        cost = moment.weight * self._error(moment.place, places)
        # Between two scheduled sigmas a forecast counts as that of a step.
        off = max(1, moment.step - self.since) * (self.cost + cost) / self._allowed(moment)
        why_not = self._why_not(moment, places, off)
        if why_not is None:
            self.cost += cost
            self.refused = 0
            return Decision(Kind.FORECAST, f"expected to be off by {off:.2g} times the tolerance")
        if self.known and self.cost == 0.0 and off > 1.0:
            self.refused += 1
        self.graded = (_distance(moment.place, places, self.gain), moment.weight, self._allowed(moment))
        self.cost, self.since = 0.0, moment.step
        patience = min(PATIENCE, moment.steps // FEW)
        may_merge = bool(places) and moment.weight <= END and self.window.active(moment.step, moment.steps)
        return Decision(Kind.MERGED if may_merge and self.refused >= patience else Kind.FULL, why_not)

    def _why_not(self, moment: Moment, places: Sequence[float], off: float) -> str | None:
        """Why this evaluation is not to be forecast, or None."""
        if moment.step >= moment.steps - 1:
            return "near the end of the run"
        if moment.weight > END:
            return "this step removes too much noise at once"
        if not self.known:
            return UNKNOWN
        if places and moment.place <= places[-1] + SAME:
            return "evaluated once more at the same sigma"
        if off > 1.0 and self.cost > 0.0:
            return f"with the forecasts before it, this one would be off by {off:.2g} times the tolerance"
        if off > 1.0:
            return f"a forecast would be off by {off:.2g} times the tolerance"
        if len(places) > 1 and moment.place - places[-1] > REACH * (places[-1] - places[-2]):
            return "too far from the last answers to be forecast"
        return None

    def _allowed(self, moment: Moment) -> float:
        """What the interval up to this step may cost."""
        return self.tolerance * ((max(0, moment.step - self.since) + 1) / moment.steps) ** 0.5

    def _error(self, place: float, places: Sequence[float]) -> float:
        """The relative error that a forecast at `place` is expected to have."""
        return self.floor + self.rate * _distance(place, places, self.gain) if places and self.known else inf

    def restart(self) -> None:
        self.rate, self.floor, self.refused, self.cost, self.graded = inf, 0.0, 0, 0.0, None

    def learn(self, error: float, gain: float = 1.0) -> float | None:
        self.gain = gain
        if self.graded is None:
            return None
        distance, weight, allowed = self.graded
        if distance > 0:
            seen = error / distance if isfinite(error) else inf
            self.rate = max(seen, SLOW * self.rate) if self.known else seen
        elif isfinite(error):
            self.floor = max(error, SLOW * self.floor)
        return weight * error / allowed

    @property
    def known(self) -> bool:
        """Whether a grade has shown the rate. One that is no number shows nothing: the next one counts."""
        return self.rate < inf


def _distance(place: float, places: Sequence[float], gain: float) -> float:
    """How far a forecast at `place` reaches, as its error is expected to grow: m from an answer that is held,
    m (m + g) / g along the line through two that are g apart, and in between with a gain between 0 and 1. 0 if there
    is nothing to forecast from, or nothing to go."""
    if not places or place <= places[-1] + SAME:
        return 0.0
    ahead = place - places[-1]
    return ahead if len(places) < 2 else ahead * (1.0 + gain * ahead / (places[-1] - places[-2]))


def noise_level(sigma: float, flow: bool) -> float:
    """The share of noise in what the model sees, 0 to 1: sigma itself in flow matching, else sigma / (1 + sigma)."""
    return min(max(sigma, 0.0), 1.0) if flow else sigma / (1.0 + sigma)


def moment_at(sigma: float, sigmas: Sequence[float], flow: bool) -> Moment:
    """Where an evaluation at `sigma` lies on a schedule of S + 1 sigmas."""
    level = noise_level(sigma, flow)
    next_sigma = max((s for s in sigmas if s < sigma * (1 - 1e-3)), default=0.0)
    weight = 1.0 - noise_level(next_sigma, flow) / level if level > 0 else 1.0
    return Moment(step_of(sigma, sigmas), max(1, len(sigmas) - 1), 1.0 - level, weight)


def step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """The step a model call at `sigma` belongs to. `sigmas` are the S + 1 bounds of S steps, in any order.

    A sigma that is off by rounding (half precision, 1e-3) counts as the scheduled one; of a sigma that is
    scheduled twice, the later step. Samplers with added noise call above the first sigma: that is step 0.
    """
    steps = range(max(1, len(sigmas) - 1))
    nearest = min(steps, key=lambda step: (abs(sigmas[step] - sigma), -step))
    if abs(sigmas[nearest] - sigma) <= 1e-3 * sigma:
        return nearest
    between = (step for step in steps if min(sigmas[step : step + 2]) < sigma < max(sigmas[step : step + 2]))
    return next(between, nearest)
