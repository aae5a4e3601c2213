"""TaylorSeer (arXiv 2503.06923): every N-th step runs, the others are continued by differences.

With D0 = F, Dm+1 = (Dm(last) - Dm(the one before)) / N over the steps that ran, the answer k steps after the last is

    F(k) = sum over m = 0..order of  Dm k^m / m!

The first `first` steps all run, and the last one. The original continues the outputs of attention and MLP of each
block; here it is the network's output, as cache-dit does it with a whole row of blocks.
"""

from __future__ import annotations

from math import factorial

from torch import Tensor

from .skipping import Seen


def runs(step: int, steps: int, interval: int, first: int) -> bool:
    return step < first or step == steps - 1 or (step - first + 1) % interval == 0


def speedup(steps: int, interval: int, first: int) -> float:
    return steps / sum(runs(step, steps, interval, first) for step in range(steps))


class TaylorSeer:
    def __init__(self, order: int, interval: int, first: int) -> None:
        self.order, self.interval, self.first = order, interval, first
        self.differences: list[Tensor] = []
        self.last = 0

    def guess(self, step: int, steps: int, sigma: float, x: Tensor) -> Tensor | None:
        if runs(step, steps, self.interval, self.first):
            return None
        ahead = step - self.last
        return sum(d * (ahead**m / factorial(m)) for m, d in enumerate(self.differences))

    def saw(self, seen: Seen) -> None:
        before, apart = self.differences, seen.step - self.last
        self.differences = [seen.velocity]
        for m in range(min(self.order, len(before))):
            self.differences.append((self.differences[m] - before[m]) / apart)
        self.last = seen.step
