"""What a user can set, and the presets that set it for them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from .plan import ErrorBudget, Plan, ReuseSchedule

TILE_SIZES = (4, 8, 16, 32, 0)
BUDGETS = ("adaptive", "equal")


class MergeWhere(str, Enum):
    """Which part of a transformer block runs on merged tokens."""

    BLOCK = "whole block"
    LAYER = "each layer"
    ATTENTION = "attention only"


class SettingsError(ValueError):
    """A setting that cannot work; the message names the widget and what would be right."""


@dataclass(frozen=True)
class Settings:
    """What a run does. `ratio` is the share of tokens merged away in merged steps; `tolerance` how far forecasts may
    take the image from the one without them, relative to it (0: nothing is forecast)."""

    ratio: float = 0.5
    tile_size: int = 8
    reselect_every: int = 4
    reweight_every: int = 4
    start_percent: float = 0.0
    end_percent: float = 1.0
    merge: MergeWhere = MergeWhere.BLOCK
    budget: str = "equal"
    skip_first_blocks: int = -1
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "merge", _one_of("merge", self.merge, [m.value for m in MergeWhere], MergeWhere))
        _one_of("budget", self.budget, BUDGETS)
        _one_of("tile_size", self.tile_size, TILE_SIZES)
        _within("ratio", self.ratio, 0.0, 0.95)
        _within("start_percent", self.start_percent, 0.0, 1.0)
        _within("end_percent", self.end_percent, 0.0, 1.0)
        _whole("reselect_every", self.reselect_every, 1)
        _whole("reweight_every", self.reweight_every, 1)
        _whole("skip_first_blocks", self.skip_first_blocks, -1)
        _within("tolerance", self.tolerance, 0.0, 1.0)
        if self.start_percent > self.end_percent:
            raise SettingsError(
                f"start_percent is {self.start_percent:g} and end_percent {self.end_percent:g}: merging would "
                "end before it starts. Set start_percent below end_percent."
            )

    @property
    def rides(self) -> bool:
        """Whether kept tokens ride through rows of blocks; else each block, or each layer, is merged by itself."""
        return self.merge is MergeWhere.BLOCK

    @property
    def schedule(self) -> ReuseSchedule:
        window = (self.start_percent, self.end_percent)
        return ReuseSchedule(self.reselect_every, self.reweight_every, *window, merges=self.ratio > 0)

    def plan(self) -> Plan:
        """A new plan for one run."""
        return ErrorBudget(self.tolerance, self.schedule) if self.tolerance else self.schedule


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name} is {value!r}: it takes a whole number from {least} up.")


def _within(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise SettingsError(f"{name} is {value!r}: it takes a number from {low:g} to {high:g}.")


def _one_of(name: str, value: object, allowed, kind=None):
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value not in allowed:
        raise SettingsError(f"{name} is {value!r}: it takes one of {', '.join(str(a) for a in allowed)}.")
    return kind(value) if kind else value


_UNET: dict[str, Any] = dict(tile_size=16, reselect_every=1, reweight_every=1, end_percent=0.9)
_DIT: dict[str, Any] = dict(tile_size=8, reselect_every=1, reweight_every=1, end_percent=0.9)
_PAPER: dict[str, Any] = dict(ratio=0.5, merge=MergeWhere.LAYER, budget="equal")

# Where merging bought no speed beyond forecasting, a preset leaves it out (docs/benchmarks.md, "What merging adds").
PRESETS: dict[str, dict[str, Settings]] = {
    "balanced": {
        "unet": Settings(ratio=0.0, tolerance=0.3, **_UNET),
        "dit": Settings(ratio=0.0, tolerance=0.07, **_DIT),
    },
    "quality": {
        "unet": Settings(ratio=0.0, tolerance=0.07, **_UNET),
        "dit": Settings(ratio=0.0, tolerance=0.03, **_DIT),
    },
    "fast": {
        "unet": Settings(ratio=0.5, tolerance=0.6, **_UNET),
        "dit": Settings(ratio=0.0, tolerance=0.3, **_DIT),
    },
    "turbo": {
        "unet": Settings(ratio=0.0, tolerance=0.8, **_UNET),
        "dit": Settings(ratio=0.0, tolerance=0.8, **_DIT),
    },
    "paper": {
        "unet": Settings(reselect_every=10, reweight_every=5, skip_first_blocks=0, **_PAPER),
        "dit": Settings(reselect_every=1, reweight_every=1, skip_first_blocks=5, **_PAPER),
    },
}
CUSTOM = "custom"
DEFAULT = "balanced"
CUSTOM_START = Settings(ratio=0.5, tolerance=0.3, **_UNET)  # the widgets' defaults: `balanced` on a UNet, and merging


def resolve(preset: str, kind: str, **widgets) -> Settings:
    """The settings of a preset for a kind of model ("unet", "dit" or "none"), or with `custom` those of the widgets."""
    _one_of("preset", preset, [*PRESETS, CUSTOM])
    if preset != CUSTOM:
        return PRESETS[preset]["unet" if kind == "unet" else "dit"]
    known = {f.name for f in fields(Settings)}
    given = {name: value for name, value in widgets.items() if name in known}
    return replace(CUSTOM_START, **given)
