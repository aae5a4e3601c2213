"""The answer of a step that is not run, continued from those that were; and how wrong it was.

An answer is the guided clean estimate x0 that the sampler gets, a tensor of the latent's shape. Over the place p on
the schedule (see `plan.Moment`) it is continued along the line through the last two answers, damped:

    forecast(p) = a1 + gain * (p - p1) / (p1 - p0) * (a1 - a0)

With one answer only it is that answer. Not all of what a line promises comes true, and how much does differs by model,
sampler and number of steps. So the gain is learnt: each answer a2 that is computed shows how much of the line came
true,

    (a2 - a1) . (a2 - a0) / (p2 - p1)   over   (a1 - a0) . (a2 - a0) / (p1 - p0)

Both are measured along the way from a0 to a2. Along a1 - a0, as by least squares, noise in a1 alone would lengthen the
line and shorten what follows, and the gain would be too small.

A sampler's step takes the share `weight` of its answer into the image, so forecasts that were off by e have moved it
by the sum of weight * e. The next answer that is computed shows that sum: on the line from a1 to a2 the answer at p had
come so far as it would with a velocity that changes evenly,

    came(p) = (p - p1) (1 - p) / ((p2 - p1) (1 - p2)), but not past a2

where 1 - p is the share of noise. So the sampler gets a2 less most of that sum divided by its own weight. What stays in
the image is little more than how far the true answers bend away from that line.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import SAME

GAIN = 0.25  # before an answer has shown it: first answers hardly go on as they began
LEARNING = 0.5  # the share of the gain that comes from the last answer
CORRECTED = 0.8  # the share of the forecasts' errors that is taken out: the line that shows them is not exact
MOST = 3.0  # a correction is at most so many times the last forecast's weight * error: weights may fall steeply


@dataclass(frozen=True)
class Anchor:
    """An answer that was computed."""

    place: float
    answer: Tensor


@dataclass(frozen=True)
class Given:
    """A forecast that the sampler was given: a1 + ahead * (a1 - a0). `ahead` is a tensor [] where a gain is in it."""

    place: float
    weight: float
    ahead: Tensor | float


class Forecast:
    """The last two answers, and the forecasts given since."""

    def __init__(self, gain: float = GAIN, learning: float = LEARNING) -> None:
        self.gain: Tensor | float = gain  # once it is learnt, fp32 [] on the device
        self.first_gain, self.learning = gain, learning
        self.anchors: list[Anchor] = []
        self.given: list[Given] = []

    @property
    def places(self) -> tuple[float, ...]:
        return tuple(anchor.place for anchor in self.anchors)

    def at(self, place: float) -> Tensor:
        """The answer at `place`, a tensor of its own."""
        *before, last = self.anchors
        return _on(last.answer, before[0].answer, self._ahead(place)) if before else last.answer.clone()

    def _ahead(self, place: float) -> Tensor | float:
        if len(self.anchors) < 2:
            return 0.0
        before, last = self.anchors
        return self.gain * ((place - last.place) / (last.place - before.place))

    def give(self, place: float, weight: float) -> Tensor:
        """The forecast at `place`, for a sampler whose step takes the share `weight` of it."""
        self.given.append(Given(place, weight, self._ahead(place)))
        return self.at(place)

    def observe(self, place: float, answer: Tensor) -> Tensor | None:
        """Takes in an answer that was computed. Returns its grade, still on the device, fp32 [2]: the relative error
        |forecast - answer| / |answer| of the forecast in its place, and the gain of the next ones; None if there was
        nothing to forecast from."""
        grade = None
        if self.anchors:
            wrong = torch.linalg.vector_norm(self.at(place).sub_(answer).float())
            error = wrong / torch.linalg.vector_norm(answer.float()).clamp_min(1e-20)
            self.gain = self._learnt_gain(place, answer)
            grade = torch.stack((error, self.gain))
        # once more at the same place: the later one counts
        while self.anchors and place <= self.anchors[-1].place + SAME:
            self.anchors.pop()
        self.anchors = [*self.anchors[-1:], Anchor(place, answer.detach().clone())]
        self.given = []
        return grade

    def _learnt_gain(self, place: float, answer: Tensor) -> Tensor:
        """Moves the gain towards what came true of the line, between 0 and 1. If nothing has moved, towards 0."""
        *before, last = self.anchors
        gain = self.gain
        gain = gain if isinstance(gain, Tensor) else torch.full((), gain, dtype=torch.float32, device=answer.device)
        if not before or place <= last.place + SAME:
            return gain
        line, came = _square(last.answer - before[0].answer), _square(answer - last.answer)
        way = _square(answer - before[0].answer)  # 2 u . (u + v) = |u + v|^2 + |u|^2 - |v|^2
        best = (way + came - line) / (way + line - came)
        best = best * ((last.place - before[0].place) / (place - last.place))
        return torch.lerp(gain, best.clamp(0.0, 1.0).nan_to_num(0.0), self.learning)

    def corrected(self, place: float, weight: float, answer: Tensor) -> Tensor:
        """The answer that was computed at `place`, less what the forecasts before it have got wrong. To be asked before
        the answer is taken in."""
        if not self.given or place <= self.anchors[-1].place + SAME:
            return answer
        *before, last = self.anchors
        share = CORRECTED * min(1.0 / weight, MOST / self.given[-1].weight)
        came = share * sum(g.weight * _came(last.place, g.place, place) for g in self.given)
        made = _on(answer, last.answer, came)
        if before:
            foretold = share * sum(g.weight * g.ahead for g in self.given)
            made = made.sub_((last.answer - before[0].answer).mul_(foretold))
        return made

    def forget(self) -> None:
        """The history starts anew."""
        self.anchors, self.given, self.gain = [], [], self.first_gain


def _came(begin: float, place: float, end: float) -> float:
    """How much of the way from the answer at `begin` to that at `end` the answer at `place` had come."""
    return min(1.0, (place - begin) * (1.0 - place) / ((end - begin) * max(1.0 - end, SAME)))


def _square(x: Tensor) -> Tensor:
    """|x|^2, fp32 []."""
    return torch.linalg.vector_norm(x.float()).square()


def _on(last: Tensor, before: Tensor, ahead: Tensor | float) -> Tensor:
    """last + ahead * (last - before), a tensor of its own."""
    return (last - before).mul_(ahead).add_(last)
