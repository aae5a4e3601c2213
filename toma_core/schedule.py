"""At this point of the sampling run: leave the tokens alone, reselect, reweight or reuse.

The whole rule, which the front end restates: of S steps, step s is active if start <= s / S and
(s + 1) / S <= end, so that an end before 100 % leaves the last step alone, however few there are. Counted
from the first active step, every `reselect_every`-th step reselects; of the others, every
`reweight_every`-th since then reweights; the rest reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import ceil, floor


class Action(str, Enum):
    LEAVE = "leave"
    RESELECT = "reselect"
    REWEIGHT = "reweight"
    REUSE = "reuse"


@dataclass(frozen=True)
class Schedule:
    reselect_every: int = 10
    reweight_every: int = 5
    start_percent: float = 0.0
    end_percent: float = 1.0

    def span(self, steps: int) -> tuple[int, int]:
        """The first active step and the one after the last."""
        # 0.6 * 20 and 0.35 * 20 must not miss a step for the last bit of a float
        return ceil(self.start_percent * steps - 1e-6), floor(self.end_percent * steps + 1e-6)

    def action(self, step: int, steps: int) -> Action:
        first, end = self.span(steps)
        if not first <= step < end:
            return Action.LEAVE
        since = (step - first) % self.reselect_every
        if since == 0:
            return Action.RESELECT
        return Action.REWEIGHT if since % self.reweight_every == 0 else Action.REUSE

    def table(self, steps: int) -> list[Action]:
        return [self.action(step, steps) for step in range(steps)]


def step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """The step a model call at `sigma` belongs to. `sigmas` are the S + 1 bounds of S steps, in any order.

    A sigma that is off by rounding (half precision, 1e-3) counts as the scheduled one; of a sigma that is
    scheduled twice, the later step. Samplers with added noise call above the first sigma: that is step 0.
    """
    steps = range(len(sigmas) - 1)
    nearest = min(steps, key=lambda step: (abs(sigmas[step] - sigma), -step))
    if abs(sigmas[nearest] - sigma) <= 1e-3 * sigma:
        return nearest
    between = (step for step in steps if min(sigmas[step : step + 2]) < sigma < max(sigmas[step : step + 2]))
    return next(between, nearest)


def place_of(sigma: float, step: int, sigmas: Sequence[float]) -> float:
    """How far into the schedule a call at `sigma` of step `step` is: that step, and the part of it behind."""
    first, last = sigmas[step : step + 2]
    return step + min(max((first - sigma) / (first - last), 0.0), 1.0) if first != last else float(step)


def as_json(settings: Iterable[Schedule], steps: Sequence[int]) -> list[dict]:
    """The table of each setting at each number of steps, for the front end to agree with."""
    return [
        {**asdict(schedule), "steps": count, "table": [action.value for action in schedule.table(count)]}
        for schedule in settings
        for count in steps
    ]
