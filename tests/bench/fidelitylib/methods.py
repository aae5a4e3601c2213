"""What is compared: each method is a function from a regime and a wanted speed-up to a patched MODEL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from bench import fullsize
from bench.rivals import core_caches, sada, spectrum, taylorseer, teacache
from bench.rivals.matching import tomesd
from bench.rivals.skipping import skipping
from comfyui_toma.toma_core.patcher import patch
from comfyui_toma.toma_core.settings import PRESETS, Settings

from .regimes import ONE_TOLERANCE, Regime

UNMERGED = "unmerged"
OTHER_SEED = "unmerged, other seed"
PAPER = "paper"
MERGING = "and merging"
OURS = tuple(name for name in PRESETS if name != PAPER)
TOLERANCES = (0.01, 0.03, 0.07, 0.16, 0.3, 0.6, 0.8)
MERGING_AT = (0.07, 0.3)  # tolerances at which merging is added to forecasting
MERGED_AWAY = {"unet": 0.5, "dit": 0.35}  # ... at this ratio
DEMO_SKIP = 1  # of the demo Flux's 2 + 4 blocks, where the authors leave 5 of 19 and of 38 alone
SHARES = (0.25, 0.5, 0.75)  # of tokens merged away on a DiT
Make = Callable[[object], object]


@dataclass(frozen=True)
class Point:
    """One way to draw: `setting` names it within its method, `settings` are those of a patch of ours, as full-size."""

    method: str
    setting: str
    steps: int
    make: Make = field(compare=False, default=lambda model: model)
    settings: Settings | None = None
    sources: tuple[str, ...] = ()  # whose code decides the image
    wanted: float | None = None
    decides: bool = False  # part of --quick
    other_seed: bool = False

    @property
    def key(self) -> str:
        """All that an image depends on beside regime, prompt and code. A preset by its settings, not by its name."""
        about = {k: getattr(v, "value", v) for k, v in asdict(self.settings).items()} if self.settings else self.setting
        ours = self.settings and self.method not in (PAPER, "tomesd")
        return json.dumps(["ours" if ours else self.method, about, self.steps], sort_keys=True)


@dataclass(frozen=True)
class Method:
    """`at(regime, speed)` is the point as fast as that, None if it can't be; `dial` the range of the number that
    decides how fast a method is, which has to be searched."""

    name: str
    colour: str
    at: Callable[[Regime, float], Point | None] | None = None
    dial: tuple[float, float] | None = None
    make: Callable[[object, float], object] | None = None
    sources: tuple[str, ...] = ()
    decides: bool = False
    usual_only: bool = False  # so far off, or so long to search, that one speed a regime is enough

    def speeds(self, regime: Regime) -> tuple[float, ...]:
        return (usual_speed(regime),) if self.usual_only else regime.speeds

    def dialled(self, regime: Regime, value: float, wanted: float | None = None) -> Point:
        return Point(
            self.name, f"threshold {value:.3g}", regime.steps, lambda model: self.make(model, value), None,
            self.sources, wanted, self.decides,
        )  # fmt: skip


def unmerged(regime: Regime, other_seed: bool = False) -> Point:
    name = OTHER_SEED if other_seed else UNMERGED
    return Point(name, "", regime.steps, decides=True, other_seed=other_seed)


# --------------------------------------------------------------------------- ours


def _ours(method: str, setting: str, regime: Regime, settings: Settings, **more) -> Point:
    return Point(method, setting, regime.steps, lambda model: patch(model, settings), settings, ("core",), **more)


def presets(regime: Regime) -> list[Point]:
    return [_ours(name, "", regime, PRESETS[name][regime.kind], decides=True) for name in OURS]


def tried(regime: Regime, text: str, settings: Settings) -> Point:
    """Settings from the command line."""
    return _ours(f"try {text}", "", regime, settings)


def tolerance_curve(regime: Regime) -> list[Point]:
    base = PRESETS["balanced"][regime.kind]
    return [_ours("tolerance", f"{t:g}", regime, replace(base, tolerance=t)) for t in TOLERANCES]


def and_merging(regime: Regime) -> list[Point]:
    """The same with tokens merged where forecasts fail: what merging adds."""
    base = PRESETS["fast"][regime.kind]
    return [
        _ours(MERGING, f"{t:g}", regime, replace(base, tolerance=t, ratio=MERGED_AWAY[regime.kind])) for t in MERGING_AT
    ]


def merging(regime: Regime, speed: float, base: Settings) -> Settings | None:
    """Settings that merge, and forecast nothing, as fast as that: on the UNet so many tokens at each step; on a DiT,
    where the end costs most, so many steps from the beginning."""
    if regime.kind == "unet" or not base.rides:
        for percent in range(5, 91):
            settings = replace(base, ratio=percent / 100, tolerance=0.0, start_percent=0.0, end_percent=1.0)
            if 1 / fullsize.merged_share(regime.family, settings) >= speed:
                return settings
        return None
    for ratio in SHARES:
        share = fullsize.merged_share(regime.family, replace(base, ratio=ratio))
        for merged in range(1, regime.steps - 1):  # not the first step, nor the last
            if regime.steps / (regime.steps - merged * (1 - share)) >= 0.98 * speed:
                end = (merged + 1) / regime.steps
                return replace(base, ratio=ratio, tolerance=0.0, start_percent=0.0, end_percent=end)
    return None


def _told(settings: Settings) -> str:
    until = "" if settings.end_percent == 1 else f" to {settings.end_percent:.0%}"
    return f"ratio {settings.ratio:g}{until}"


def merged_alone(regime: Regime, speed: float) -> Point | None:
    settings = merging(regime, speed, PRESETS["fast"][regime.kind])
    return settings and _ours("merged alone", _told(settings), regime, settings, wanted=speed)


# --------------------------------------------------------------------------- rivals


def fewer_steps(regime: Regime, speed: float) -> Point | None:
    steps = round(regime.steps / speed)
    if not 1 <= steps < regime.steps:
        return None
    return Point("fewer steps", f"{steps} steps", steps, wanted=speed, decides=True)


def _nearest(speed: float, found: Iterator[tuple[float, float]]) -> float | None:
    """Of pairs (speed-up, number) the number whose speed-up is nearest; None if all are a quarter off."""
    best = min(found, key=lambda pair: abs(pair[0] - speed), default=None)
    return best[1] if best and abs(best[0] / speed - 1) < 0.25 else None


def taylor(order: int) -> Callable[[Regime, float], Point | None]:
    def at(regime: Regime, speed: float) -> Point | None:
        first = min(3, max(1, regime.steps // 4))
        fast = ((taylorseer.speedup(regime.steps, n, first), n) for n in range(2, regime.steps))
        interval = _nearest(speed, ((s, n) for s, n in fast if s > 1))
        if interval is None:
            return None
        return Point(
            f"TaylorSeer {order}", f"interval {interval}", regime.steps,
            lambda model: skipping(model, lambda: taylorseer.TaylorSeer(order, interval, first)),
            None, ("skipping", "taylorseer"), speed,
        )  # fmt: skip

    return at


def spectrum_at(regime: Regime, speed: float) -> Point | None:
    fast = ((spectrum.speedup(regime.steps, g / 4), g / 4) for g in range(0, 17))
    growth = _nearest(speed, ((s, g) for s, g in fast if s > 1))
    if growth is None:
        return None
    return Point(
        "Spectrum", f"growth {growth:g}", regime.steps,
        lambda model: skipping(model, lambda: spectrum.Spectrum(growth)), None, ("skipping", "spectrum"), speed,
    )  # fmt: skip


def sada_at(regime: Regime, speed: float) -> Point | None:
    """It has no dial: the one point, whatever the speed."""
    return Point("SADA", "", regime.steps, lambda model: skipping(model, sada.SADA), None, ("skipping", "sada"))


def tomesd_at(regime: Regime, speed: float) -> Point | None:
    settings = merging(regime, speed, PRESETS["fast"][regime.kind])
    if settings is None or settings.ratio > 0.75:
        return None
    make = lambda model: patch(model, settings, select=tomesd)  # noqa: E731
    return Point("tomesd", _told(settings), regime.steps, make, settings, ("core", "matching"), speed)


def paper_at(regime: Regime, speed: float) -> Point | None:
    settings = merging(regime, speed, PRESETS[PAPER][regime.kind])
    if settings is None:
        return None
    on_demo = settings if regime.kind == "unet" else replace(settings, skip_first_blocks=DEMO_SKIP)
    return Point(PAPER, _told(settings), regime.steps, lambda model: patch(model, on_demo), settings, ("core",), speed)


def _teacache(model, threshold: float):
    return skipping(model, lambda: teacache.TeaCache(threshold))


DIAL = (0.002, 3.0)
METHODS = [
    Method("merged alone", "#8c6bb1", merged_alone, usual_only=True),
    Method("fewer steps", "#222222", fewer_steps, decides=True),
    Method("EasyCache", "#e6550d", None, DIAL, core_caches.easycache, ("core caches", "core_caches"), decides=True),
    Method("LazyCache", "#fdae6b", None, DIAL, core_caches.lazycache, ("core caches", "core_caches"), usual_only=True),
    Method("TaylorSeer 1", "#31a354", taylor(1)),
    Method("TaylorSeer 2", "#a1d99b", taylor(2)),
    Method("Spectrum", "#d62780", spectrum_at),
    Method("SADA", "#17becf", sada_at),
    Method("TeaCache-like", "#bcbd22", None, DIAL, _teacache, ("skipping", "teacache"), usual_only=True),
    Method("tomesd", "#9e6f4f", tomesd_at, usual_only=True),
    Method(PAPER, "#969696", paper_at, usual_only=True),
]
BY_NAME = {method.name: method for method in METHODS}
OUR_COLOURS = {"ours": "#1f77b4", MERGING: "#9ecae1"}
NAMES = (*OURS, "tolerance", MERGING, *BY_NAME)


def points(regime: Regime, dials: Callable[[Method, float], float | None]) -> list[Point]:
    """All points of a regime, each once. `dials(method, speed)` is the number that makes a method that fast."""
    if not regime.speeds:
        return [unmerged(regime), *(point for point in presets(regime) if point.method == ONE_TOLERANCE)]
    found = [unmerged(regime), unmerged(regime, other_seed=True), *presets(regime)]
    found += [*tolerance_curve(regime), *and_merging(regime)]
    for method in METHODS:
        for speed in method.speeds(regime):
            if method.dial is None:
                point = method.at(regime, speed)
            else:
                value = dials(method, speed)
                point = None if value is None else method.dialled(regime, value, speed)
            if point is not None:
                found.append(replace(point, decides=point.decides and speed == usual_speed(regime)))
    once = {(point.method, point.setting): point for point in reversed(found)}
    return [point for point in found if once[point.method, point.setting] is point]


def usual_speed(regime: Regime) -> float:
    """The one that --quick looks at."""
    return regime.speeds[min(regime.steps > 4, len(regime.speeds) - 1)]
