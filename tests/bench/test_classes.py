"""The table of model classes counts what failed as failed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from classes import Outcome, table


def test_what_failed_is_not_counted_as_forecast():
    broken = Outcome("b", "failed: TypeError: x", "failed: TypeError: x")
    outcomes = {"A": [Outcome("a", "yes", "yes")], "B": [broken], "C": [Outcome("c", "no: why", "yes")]}
    first = table(outcomes, {"D": "nothing is sampled"}, "1.0").splitlines()[0]
    assert first == "ComfyUI 1.0: 4 classes; merged and forecast 1, forecast only 1, neither 1, failed 1."
    assert "failed" not in table({"A": outcomes["A"]}, {}, "1.0").splitlines()[0]
