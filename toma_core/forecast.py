"""The answer of a step that is not run, continued from those that were; and how wrong it would have been.

An answer is the guided clean estimate x0 that the sampler gets, a tensor of the latent's shape. Over the place p on
the schedule (see `plan.Moment`) it is continued along the line through the last two answers, damped:

    x0(p) = a1 + gain * (p - p1) / (p1 - p0) * (a1 - a0)

With one answer only it is that answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GAIN = 0.8  # answers waver from step to step, so half of what a line promises does not come true


@dataclass(frozen=True)
class Anchor:
    """An answer that was computed."""

    place: float
    answer: Tensor


class Forecast:
    """The last two answers. `observe` takes a new one and grades the forecast that would have stood in its place."""

    def __init__(self, gain: float = GAIN) -> None:
        self.gain = gain
        self.anchors: list[Anchor] = []

    @property
    def places(self) -> tuple[float, ...]:
        return tuple(anchor.place for anchor in self.anchors)

    def at(self, place: float) -> Tensor:
        """The answer at `place`, a tensor of its own."""
        *before, last = self.anchors
        if not before:
            return last.answer.clone()
        ahead = self.gain * (place - last.place) / (last.place - before[0].place)
        return torch.lerp(before[0].answer, last.answer, 1.0 + ahead)

    def observe(self, place: float, answer: Tensor) -> Tensor | None:
        """Takes in an answer that was computed. Returns the relative error |forecast - answer| / |answer| of the
        forecast in its place, fp32 [], still on the device; None if there was nothing to forecast from."""
        error = None
        if self.anchors:
            wrong = torch.linalg.vector_norm((self.at(place) - answer).float())
            error = wrong / torch.linalg.vector_norm(answer.float()).clamp_min(1e-20)
        if self.anchors and place <= self.anchors[-1].place:  # once more at the same place: the later one counts
            self.anchors.pop()
        self.anchors = [*self.anchors[-1:], Anchor(place, answer.detach().clone())]
        return error

    def forget(self) -> None:
        """The history starts anew."""
        self.anchors = []
