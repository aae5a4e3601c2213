"""TeaCache-like reuse: the residual of the last step that ran, until its input has changed too much.

The relative change |x - x before| / |x before| (mean absolute values) is summed over the steps; below `threshold` the
network's output is x + (output - x at the last run). The original looks at the input of the first block after the time
step's modulation and corrects the change by a polynomial that was fitted to each model: to be fair it needs a real one.
"""

from __future__ import annotations

from torch import Tensor

from .skipping import Seen


class TeaCache:
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.last: Seen | None = None
        self.before: Tensor | None = None
        self.changed = 0.0

    def guess(self, step: int, steps: int, sigma: float, x: Tensor) -> Tensor | None:
        if self.before is not None:
            self.changed += float((x - self.before).abs().mean() / self.before.abs().mean())
        self.before = x.clone()
        if self.last is None or step == steps - 1 or self.changed >= self.threshold:
            return None
        return x + (self.last.velocity - self.last.x)

    def saw(self, seen: Seen) -> None:
        self.last, self.changed = seen, 0.0
