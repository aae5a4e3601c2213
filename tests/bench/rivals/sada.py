"""SADA's step criterion (arXiv 2507.17135): skip where the course is stable.

From the last three velocities y the next x is extrapolated by the third-order rule

    x^ = x - dt (5/6 y(last) + 5/6 y(before) - 4/6 y(two before))

and where the error x_now - x^ points against the second difference of y, their inner product is negative, the course is
stable and the velocity of the last step is used again. Two steps in a row are not skipped, nor the last one. The
original also prunes tokens on SDXL and skips further with interpolated clean estimates near the end: left out here.
"""

from __future__ import annotations

from torch import Tensor

from .skipping import Seen


class SADA:
    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def guess(self, step: int, steps: int, sigma: float, x: Tensor) -> Tensor | None:
        if len(self.seen) < 3 or step == steps - 1 or self.seen[-1].step != step - 1:
            return None
        two, before, last = self.seen[-3:]
        slope = (5 * last.velocity + 5 * before.velocity - 4 * two.velocity) / 6
        error = x - (last.x - (last.sigma - sigma) * slope)
        second = last.velocity - 2 * before.velocity + two.velocity
        return last.velocity if float((error * second).sum()) < 0 else None

    def saw(self, seen: Seen) -> None:
        self.seen = [*self.seen[-2:], seen]
