"""A MODEL whose evaluations are left to a rule: run, or take the velocity that the rule puts in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

KEY = "rival"


@dataclass(frozen=True)
class Seen:
    """An evaluation that ran: the velocity of its answer."""

    step: int
    sigma: float
    x: Tensor
    velocity: Tensor


class Skipper(Protocol):
    """The rule of one run."""

    def guess(self, step: int, steps: int, sigma: float, x: Tensor) -> Tensor | None:
        """The velocity in the place of this evaluation; None: run it."""

    def saw(self, seen: Seen) -> None:
        """An evaluation ran."""


def skipping(model, new: Callable[[], Skipper]):
    """A clone of the ModelPatcher; each of its runs has a rule of its own. For flow models, one evaluation a step."""
    from comfy.patcher_extension import WrappersMP

    model = model.clone()
    rule: Skipper | None = None
    step = 0

    def run(executor, *args, **kwargs):
        nonlocal rule, step
        rule, step = new(), 0
        try:
            return executor(*args, **kwargs)
        finally:
            rule = None

    def answer(executor, x: Tensor, timestep: Tensor, model_options: dict, seed=None) -> Tensor:
        nonlocal step
        sigma = float(timestep.flatten()[0])
        steps = len(model_options["transformer_options"]["sample_sigmas"]) - 1
        now, step = step, step + 1
        velocity = rule.guess(now, steps, sigma, x)
        if velocity is None:
            clean = executor(x, timestep, model_options, seed)
            rule.saw(Seen(now, sigma, x.clone(), (x - clean) / sigma))
            return clean
        return x - sigma * velocity

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, run)
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, answer)
    return model
