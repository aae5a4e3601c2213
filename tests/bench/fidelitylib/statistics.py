"""What chance explains and what it doesn't: over prompts, in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import mean, stdev

from scipy.stats import t as students_t


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean (Student's t)."""
    if len(values) < 2:
        return float("inf")
    return float(students_t.ppf(0.975, len(values) - 1)) * standard_error(values)


def differs(values: Sequence[float]) -> int:
    """-1 or 1 if the mean of these differences is below or above zero beyond chance (95 %), else 0."""
    if not values or abs(mean(values)) <= interval(values):
        return 0
    return 1 if mean(values) > 0 else -1


def at_speed(curve: Sequence[dict], speed: float, measure: str, count: int) -> list[float] | None:
    """The measure of each of the first `count` prompts at a speed-up, between the two rows of a curve around it:
    logarithms along the logarithm of the speed-up. Below the slowest row that row stands; None beyond the fastest."""
    rows = sorted((row for row in curve if len(row["each"][measure]) >= count), key=lambda row: row["speedup"])
    if not rows or speed > 1.02 * rows[-1]["speedup"]:
        return None
    after = next((row for row in rows if row["speedup"] >= speed), rows[-1])
    before = next((row for row in reversed(rows) if row["speedup"] <= speed), after)
    if after is before or after["speedup"] == before["speedup"]:
        return after["each"][measure][:count]
    share = log(speed / before["speedup"]) / log(after["speedup"] / before["speedup"])
    pairs = zip(before["each"][measure][:count], after["each"][measure][:count])
    return [exp((1 - share) * log(max(a, 1e-6)) + share * log(max(b, 1e-6))) for a, b in pairs]
