"""Spectrum: the course of a feature as Chebyshev polynomials T0..TM of the time on the schedule, tau in [-1, 1].

Coefficients are a ridge regression on all features that ran, C = (X^T X + lambda I)^-1 X^T H with X_im = Tm(tau_i); a
forecast is half T(tau) C and half Newton's local difference of first order. The interval between steps that run begins
at 2 and grows by `growth` each time; the first tenth of the steps (at least two) all run, and the last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .skipping import Seen

DEGREE, RIDGE, BLEND, INTERVAL = 4, 0.1, 0.5, 2.0


def schedule(steps: int, growth: float) -> list[bool]:
    """Which steps run."""
    first, interval, since = max(2, round(0.1 * steps)), INTERVAL, 0
    found = []
    for step in range(steps):
        since += 1
        run = step < first or step == steps - 1 or since >= int(interval)
        if run:
            since = 0
            interval += growth if step >= first else 0.0
        found.append(run)
    return found


def speedup(steps: int, growth: float) -> float:
    return steps / sum(schedule(steps, growth))


def chebyshev(tau: Tensor) -> Tensor:
    """[K] -> [K, DEGREE + 1]"""
    columns = [torch.ones_like(tau), tau]
    while len(columns) <= DEGREE:
        columns.append(2 * tau * columns[-1] - columns[-2])
    return torch.stack(columns, 1)


class Spectrum:
    def __init__(self, growth: float) -> None:
        self.growth = growth
        self.seen: list[Seen] = []

    def guess(self, step: int, steps: int, sigma: float, x: Tensor) -> Tensor | None:
        if schedule(steps, self.growth)[step]:
            return None
        return BLEND * self._fitted(step, steps) + (1 - BLEND) * self._local(step)

    def saw(self, seen: Seen) -> None:
        self.seen.append(seen)

    def _fitted(self, step: int, steps: int) -> Tensor:
        tau = torch.tensor([2.0 * at / steps - 1.0 for at in (*(seen.step for seen in self.seen), step)])
        basis = chebyshev(tau)
        design, wanted = basis[:-1], basis[-1]
        features = torch.stack([seen.velocity.flatten() for seen in self.seen])
        weights = torch.linalg.solve(design.T @ design + RIDGE * torch.eye(DEGREE + 1), design.T)
        return ((wanted @ weights) @ features).view_as(self.seen[-1].velocity)

    def _local(self, step: int) -> Tensor:
        last = self.seen[-1]
        if len(self.seen) < 2:
            return last.velocity
        before = self.seen[-2]
        return torch.lerp(before.velocity, last.velocity, 1 + (step - last.step) / (last.step - before.step))
