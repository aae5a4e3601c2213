"""What is compared: each of our presets, the rivals at the same speed-up, and what a user would do instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from bench import _rivals as rivals
from bench import fullsize
from comfyui_toma.toma_core.settings import PRESETS, Settings

STEPS = 20
SIXTY_PERCENT = 12
FEW = ((8, 6), (4, 3))  # runs that are short already, and what dropping steps makes of them
SHORT = 1.3  # how fast merging makes them
CACHE = 0.02  # the gentlest that skips anything on the demo Flux; its default is 0.2
OURS = ("quality", "balanced", "fast")
ENDS = ("toma at 1.15x", "toma at 2x")  # of the curve that the presets lie on
# Ways to pick and merge that take our place in the blocks
RIVALS = {
    "tomesd": rivals.tomesd_matching,
    "pooling": rivals.pooling,
    "random": rivals.random_picks,
    "regular": rivals.regular_picks,
}
REUSE = {"as it was": "reuse", "drifting": "reuse with drift"}
CARRIED = ", carried"  # picks of a rival in everything else that a preset does


@dataclass(frozen=True)
class Point:
    """One way to be faster than a run of `of_steps` steps: merging, fewer steps, a cache, or two of them."""

    method: str
    settings: Settings | None = None
    steps: int = STEPS
    of_steps: int = STEPS
    cache: float | None = None
    keys_and_values: float | None = None
    reuse: str = ""  # where merged blocks would run none does: "as it was", what the full step added is added
    # again; "drifting", as it changed from one full step to the next
    against: str = ""  # the method whose speed-up it was made to have
    skip_in_demo: int | None = None  # the demo models have fewer blocks than the real ones

    @property
    def decides(self) -> bool:
        """Whether a preset stands or falls by it: drawn first."""
        return self.method in (*OURS, "paper", "fewer steps")

    @property
    def choose(self) -> Callable | None:
        return RIVALS.get(self.method.removesuffix(CARRIED))

    def on_demo(self) -> Settings | None:
        """The settings for the demo model; `settings` are those for the full-size one."""
        if self.settings is None or self.skip_in_demo is None:
            return self.settings
        return replace(self.settings, skip_first_blocks=self.skip_in_demo)

    def describe(self) -> dict:
        """All that the pictures depend on, for the JSON rows and for the names of kept files."""
        told = {"steps": self.steps, "easycache": self.cache, "keys and values": self.keys_and_values}
        told = {name: value for name, value in told.items() if value is not None}
        if self.reuse:
            told["reuse"] = self.reuse
        if settings := self.on_demo():
            told |= {name: getattr(value, "value", value) for name, value in asdict(settings).items()}
        return told

    @property
    def key(self) -> str:
        chosen_by = self.method.removesuffix(CARRIED) if self.choose else ""
        return json.dumps([chosen_by, self.describe()], sort_keys=True)

    @property
    def label(self) -> str:
        parts = [self.method]
        if self.settings:
            s = self.settings
            since = f" from {s.start_percent:.0%}" if s.start_percent else ""
            until = f" to {s.end_percent:.0%}" if s.end_percent < 1 else ""
            parts.append(f"ratio {s.ratio:.2f} every {s.reselect_every}{since}{until}")
        if self.cache is not None:
            parts.append(f"threshold {self.cache:g}")
        if self.keys_and_values is not None:
            parts.append(f"ratio {self.keys_and_values:g}")
        if self.steps != STEPS:
            parts.append(f"{self.steps} steps")
        return ", ".join(parts)


def speedup(family: str, settings: Settings, steps: int = STEPS, reuse: bool = False) -> float:
    return fullsize.speedup_by_flops(family, settings, steps, reuse=reuse)


def at_speed(family: str, settings: Settings, wanted: float, steps: int = STEPS) -> Settings:
    """The settings with the ratio that gives this speed-up (of the full-size model, by FLOPs)."""
    low, high = 0.0, 0.95
    for _ in range(30):
        middle = (low + high) / 2
        faster = speedup(family, replace(settings, ratio=middle), steps) > wanted
        low, high = (low, middle) if faster else (middle, high)
    return replace(settings, ratio=round(low, 4))


def until_speed(family: str, settings: Settings, wanted: float, reuse: bool = False) -> Settings:
    """The settings, ended at the step that comes nearest to this speed-up: for what has no free ratio."""
    first = round(settings.start_percent * STEPS) + 1
    ends = [replace(settings, end_percent=step / STEPS) for step in range(first, STEPS + 1)]
    return min(ends, key=lambda s: abs(speedup(family, s, reuse=reuse) - wanted))


def reused(family: str, settings: Settings, wanted: float) -> Settings:
    """The shortest interval between full steps that reaches this speed-up if nothing is computed between, to 2 %; else
    the one that comes nearest."""
    tries = []
    for every in (2, 3, 4, 5):
        spaced = replace(settings, reselect_every=every, reweight_every=every)
        tries.append(until_speed(family, spaced, wanted, reuse=True))
    off = [abs(speedup(family, t, reuse=True) / wanted - 1) for t in tries]
    return next((t for t, o in zip(tries, off) if o < 0.02), tries[off.index(min(off))])


def _every_step(ratio: float = 0.5) -> Settings:
    return Settings(ratio=ratio, carry_detail=False, reselect_every=1, reweight_every=1, skip_first_blocks=0)


def points(family: str, quick: bool = False) -> list[Point]:
    """All of them, the most telling first. Speed-ups are matched on the full-size model."""
    presets = {name: PRESETS[name][family] for name in OURS}
    seldom = presets["fast"].reselect_every + 1
    fastest = replace(presets["fast"], reselect_every=seldom, reweight_every=seldom)
    gentlest = until_speed(family, presets["quality"], 1.18)
    ends = at_speed(family, gentlest, 1.15), at_speed(family, fastest, 2.0)
    ours = presets | dict(zip(ENDS, ends))
    speeds = {name: speedup(family, settings) for name, settings in ours.items()}
    skip = 1 if family == "flux" else None

    def paper(wanted: float, against: str) -> Point:
        return Point("paper", at_speed(family, PRESETS["paper"][family], wanted), against=against, skip_in_demo=skip)

    def rival(name: str, against: str) -> Point:
        wanted = speeds[against]
        if name == "pooling":  # only whole pairs or fours can be pooled
            return Point(name, until_speed(family, _every_step(0.5 if wanted < 1.7 else 0.75), wanted), against=against)
        return Point(name, at_speed(family, _every_step(), wanted), against=against)

    found = [Point(name, presets[name]) for name in OURS]
    found += [paper(speeds[name], name) for name in OURS] + [paper(1.25, "1.25x")]
    found += [Point("fewer steps", steps=steps) for steps in (17, 13, 10)]
    if quick:
        return found
    for short, dropped in FEW:
        merged = at_speed(family, presets["balanced"], SHORT, short)
        if speedup(family, merged, short) < 0.98 * SHORT:  # only with the last step merged, too
            merged = at_speed(family, replace(merged, end_percent=1.0), SHORT, short)
        found.append(Point("short run", merged, short, short))
        found.append(Point("short run, fewer steps", steps=dropped, of_steps=short))
    found.append(Point("60 % of the steps", steps=SIXTY_PERCENT))
    found.append(Point("balanced on 60 % of the steps", presets["balanced"], SIXTY_PERCENT))
    found.append(Point("easycache", cache=CACHE))
    found.append(Point("balanced on easycache", presets["balanced"], cache=CACHE))
    found += [Point(name, ours[name]) for name in ENDS] + [paper(speeds[name], name) for name in ENDS]
    found += [Point(name + CARRIED, presets["balanced"], against="balanced") for name in ("random", "regular")]
    for how, method in REUSE.items():
        found += [Point(method, reused(family, presets[name], speeds[name]), reuse=how, against=name) for name in OURS]
    found += [rival(name, against) for against in ("fast", "quality", *ENDS, "balanced") for name in RIVALS]
    found.append(Point("keys and values", keys_and_values=0.75))
    return found
