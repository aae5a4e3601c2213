"""What a user can set, and the presets that set it for them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

from .schedule import Schedule

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
    """One way to merge. `ratio` is the share of tokens merged away.

    `carry_detail`: a step that picks tokens runs unmerged and remembers what the blocks added to every
    token and how that changes; the merged steps after it compute only what differs from its going on so.
    Without it every step is merged and tokens of one group all receive the same.
    """

    ratio: float = 0.5
    tile_size: int = 8
    reselect_every: int = 4
    reweight_every: int = 4
    start_percent: float = 0.0
    end_percent: float = 1.0
    merge: MergeWhere = MergeWhere.BLOCK
    budget: str = "equal"
    skip_first_blocks: int = -1
    carry_detail: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "merge", _one_of("merge", self.merge, [m.value for m in MergeWhere], MergeWhere)
        )
        _one_of("budget", self.budget, BUDGETS)
        _one_of("tile_size", self.tile_size, TILE_SIZES)
        _within("ratio", self.ratio, 0.0, 0.95)
        _within("start_percent", self.start_percent, 0.0, 1.0)
        _within("end_percent", self.end_percent, 0.0, 1.0)
        _whole("reselect_every", self.reselect_every, 1)
        _whole("reweight_every", self.reweight_every, 1)
        _whole("skip_first_blocks", self.skip_first_blocks, -1)
        if not isinstance(self.carry_detail, bool):
            raise SettingsError(f"carry_detail is {self.carry_detail!r}: it takes true or false.")
        if self.start_percent > self.end_percent:
            raise SettingsError(
                f"start_percent is {self.start_percent:g} and end_percent {self.end_percent:g}: merging would "
                "end before it starts. Set start_percent below end_percent."
            )

    @property
    def carries(self) -> bool:
        """Whether detail is carried: it needs merged steps between two picks, and whole blocks."""
        return self.carry_detail and self.reselect_every > 1 and self.merge is MergeWhere.BLOCK

    @property
    def schedule(self) -> Schedule:
        reweight = self.reselect_every if self.carries else self.reweight_every
        return Schedule(self.reselect_every, reweight, self.start_percent, self.end_percent)


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


_BALANCED = Settings(ratio=0.85, tile_size=8, reselect_every=2, reweight_every=2, end_percent=0.9)
_QUALITY = replace(_BALANCED, start_percent=0.3)
_FAST_UNET = Settings(ratio=0.92, tile_size=8, reselect_every=3, reweight_every=3)
_FAST_FLUX = Settings(ratio=0.85, tile_size=8, reselect_every=3, reweight_every=3, end_percent=0.9)
_PAPER = dict(ratio=0.5, merge=MergeWhere.LAYER, budget="equal", carry_detail=False)

PRESETS: dict[str, dict[str, Settings]] = {
    "balanced": {"unet": _BALANCED, "flux": _BALANCED},
    "quality": {"unet": _QUALITY, "flux": _QUALITY},
    "fast": {"unet": _FAST_UNET, "flux": _FAST_FLUX},
    "paper": {
        "unet": Settings(reselect_every=10, reweight_every=5, skip_first_blocks=0, **_PAPER),
        "flux": Settings(reselect_every=1, reweight_every=1, skip_first_blocks=5, **_PAPER),
    },
}
CUSTOM = "custom"


def resolve(preset: str, family: str, **widgets) -> Settings:
    """The settings of a preset for a model family, or with `custom` those of the widgets."""
    _one_of("preset", preset, [*PRESETS, CUSTOM])
    if preset != CUSTOM:
        return PRESETS[preset][family]
    known = {f.name for f in fields(Settings)}
    return Settings(**{name: value for name, value in widgets.items() if name in known})
