"""How close and how good sped-up images are: python dev.py bench fidelity [--quick] [--regime NAME] [--only METHOD]

Samples the embedded demo models unmerged, with our presets, and with what others do, at the same seeds, in the regimes
that people work in. Speed-ups are by the FLOPs of the full-size models, of the evaluations that really ran. What was
drawn is kept in .dev/fidelity: an interrupted run goes on where it was, and two may draw at once, each with regimes of
its own and OMP_NUM_THREADS=1. Figures of the docs:

    python dev.py bench fidelity --json tests/bench/results/fidelity.json --write docs/benchmarks.md --plots docs
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "training"), str(TESTS)]

from comfy_here import import_comfyui  # noqa: E402

BASE = tempfile.TemporaryDirectory()
import_comfyui(Path(BASE.name))

import comfyui_toma  # noqa: E402,F401
from bench.fidelitylib import methods, plots, rows, tables  # noqa: E402
from bench.fidelitylib.measures import Measures  # noqa: E402
from bench.fidelitylib.methods import Method, Point  # noqa: E402
from bench.fidelitylib.options import checked, chosen_regimes, number_of_prompts, parsed, share_of, wants  # noqa: E402
from bench.fidelitylib.regimes import prompts  # noqa: E402
from bench.fidelitylib.studio import Studio, dialled  # noqa: E402
from comfyui_toma.toma_core.settings import Settings  # noqa: E402
from demo_pack import loading  # noqa: E402

OUT = TESTS.parent / ".dev" / "fidelity"
DOWNLOADS = TESTS.parent / ".dev" / "training"
DIALS = TESTS / "bench" / "results" / "dials.json"
IN_README = "flux-20"  # the regime of its first image
AT_ONCE = 4  # prompts of all regimes, before more prompts of any


@cache
def loaded(model: str):
    """A demo model and the files that it is made of; None if it isn't there yet."""
    if model == "student":
        load = getattr(loading, "load_demo_student", None)
        file = getattr(loading, "STUDENT_FILE", None)
        return (load(), (loading.FLUX_FILE, file)) if load and file and file.is_file() else None
    if model == "unet":
        return loading.load_demo_unet(), (loading.UNET_FILE,)
    return loading.load_demo_flux(), (loading.FLUX_FILE,)


class Dials:
    """The numbers that make methods as fast as wanted, found on the first tuning prompt and kept among the results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = self._read()

    def _read(self) -> dict[str, float | None]:
        return json.loads(self.path.read_text()) if self.path.is_file() else {}

    def of(self, studio: Studio, search: bool) -> Callable[[Method, float], float | None]:
        regime = studio.regime

        def value(method: Method, speed: float) -> float | None:
            name = f"{regime.name}, {method.name}, {speed:g}x"
            if name not in self.known and search:
                found = self._search(studio, method, speed)
                self.known = {**self._read(), **self.known, name: found}  # another process may have put some there
                self.path.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")
            return self.known.get(name)

        return value

    def _search(self, studio: Studio, method: Method, speed: float) -> float | None:
        regime = studio.regime
        name = prompts(1, held_out=False)[0]
        tuning = Studio(studio.folder, regime, studio.model, studio.weights, [name])

        def speed_at(value: float) -> float:
            point = method.dialled(regime, value)
            drawn = tuning.drawn(point, name) if tuning.is_drawn(point, name) else tuning.draw(point, name)
            return regime.steps / max(drawn.ran, 1)

        print(f"{regime.name}: looking for {method.name} at {speed:g}x", flush=True)
        return dialled(speed, speed_at, method.dial)


def studios(options: argparse.Namespace) -> list[Studio]:
    found = []
    for regime in chosen_regimes(options):
        here = loaded(regime.model)
        if here is None:
            print(f"{regime.name}: there is no {regime.model} yet")
            continue
        names = prompts(number_of_prompts(options, regime), not options.tune)
        found.append(Studio(OUT, regime, here[0], here[1], names))
    return found


def points(studio: Studio, dials: Dials, options: argparse.Namespace, search: bool) -> list[Point]:
    """Those that are asked for; a method's number is searched only if the method is."""
    find = dials.of(studio, search and not options.tries)

    def value(method: Method, speed: float) -> float | None:
        probe = Point(method.name, "", 0, decides=method.decides and speed == methods.usual_speed(studio.regime))
        return find(method, speed) if wants(options, probe) else None

    found = methods.points(studio.regime, value)
    for text in options.tries or ():
        found.append(methods.tried(studio.regime, text, Settings(**parsed(text))))
    return [point for point in found if wants(options, point)]


def missing(drawing: list[tuple[Studio, list[Point]]]) -> Iterator[tuple[Studio, Point, str]]:
    """What isn't drawn yet: a few prompts of all that decides, of the rest, then more prompts."""
    most = max((len(studio.names) for studio, _ in drawing), default=0)
    for first in range(0, most, AT_ONCE):
        for decides in (True, False):
            for studio, chosen in drawing:
                names = studio.names if decides else studio.names[: share_of(len(studio.names))]
                for name in names[first : first + AT_ONCE]:
                    for point in chosen:
                        if point.decides is decides and not studio.is_drawn(point, name):
                            yield studio, point, name


def seconds_of(studio: Studio, point: Point) -> float:
    """About what drawing it takes on one core."""
    each = {"unet": 0.3, "flux": 0.2, "student": 0.2}[studio.regime.model]
    share = 1 / point.wanted if point.wanted else 0.5 if point.settings else 1.0
    return each * point.steps * share * (1 if studio.regime.tokens == 1024 else 7.5)


def draw_all(drawing: list[tuple[Studio, list[Point]]], until: float) -> None:
    now = None
    for studio, point, name in missing(drawing):
        if time.monotonic() > until:
            print("time is up, not all is drawn", flush=True)
            return
        about = (studio.regime.name, point.method)
        if about != now:
            now = about
            print(f"{studio.regime.name}: {point.method} {point.setting}", flush=True)
        studio.draw(point, name)


def measured(options: argparse.Namespace) -> list[dict]:
    """Draws what is missing, and measures it."""
    dials = Dials(DIALS)
    until = time.monotonic() + 60 * options.minutes
    found = studios(options)
    if options.plan:
        todo = list(missing([(s, points(s, dials, options, search=False)) for s in found]))
        hours = sum(seconds_of(studio, point) for studio, point, _ in todo) / 3600
        print(f"{len(todo)} images to draw, about {hours:.1f} hours on one core")
        return []
    # what needs no search comes first: a search is for rivals only
    draw_all([(studio, points(studio, dials, options, search=False)) for studio in found], until)
    drawing = [(studio, points(studio, dials, options, search=time.monotonic() < until)) for studio in found]
    draw_all(drawing, until)
    measures = Measures(DOWNLOADS, not options.no_inception)
    made = []
    for studio, chosen in drawing:
        measured = rows.Measured(studio, measures)
        some = [row for point in chosen if (row := rows.row_of(measured, point, not options.tune))]
        tables.print_rows(studio.regime, some)
        if options.plots and studio.regime.name == IN_README:
            plots.before_and_after(studio, chosen, options.plots)
        plots.sheet(studio, chosen, OUT / f"sheet-{studio.regime.name}.png")
        made += some
    return made


def main(argv: list[str] | None = None) -> None:
    options = checked(__doc__, argv)
    logging.getLogger().setLevel(logging.ERROR)
    if options.read:
        made = rows.read(options.read)
    else:
        made = measured(options)
        if options.json and made:
            made = rows.joined(rows.read(options.json) if options.json.is_file() else [], made)
            rows.write(made, options.json)
    if not made:
        raise SystemExit(0 if options.plan else "There are no rows, and nothing is written.")
    for line in tables.verdicts(made):
        print(line)
    if options.plots:
        plots.frontiers(made, options.plots)
    if options.write:
        tables.write(made, options.write)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped; the same command goes on where it was.") from None
