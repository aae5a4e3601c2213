"""What merging costs the picture: python dev.py bench fidelity [--quick] [--json FILE] [--model flux|unet]

Samples the embedded demo models unmerged, merged by each method, with fewer steps and with a cache, at the same
seeds, and measures how far each picture is from the unmerged one. Speed-ups are by the FLOPs of the full-size
models with the same settings, and measured on the demo models. Prompt by prompt the methods take their turn, and
what was drawn is kept in .dev/fidelity: an interrupted run goes on where it was. Each row says how many prompts
it is from: one that --minutes ended early has fewer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "training"), str(TESTS)]

from comfy_here import import_comfyui  # noqa: E402

BASE = tempfile.TemporaryDirectory()
import_comfyui(Path(BASE.name))

import comfyui_toma  # noqa: E402,F401
import torch  # noqa: E402
from bench import fullsize  # noqa: E402
from bench.fidelitylib import findings, report  # noqa: E402
from bench.fidelitylib.distances import Distances  # noqa: E402
from bench.fidelitylib.options import FAMILIES, checked, chosen_points, number_of_prompts  # noqa: E402
from bench.fidelitylib.parts import joined  # noqa: E402
from bench.fidelitylib.points import STEPS, Point  # noqa: E402
from bench.fidelitylib.studio import Drawn, Studio  # noqa: E402
from demo_pack import captions, loading  # noqa: E402

OUT = TESTS.parent / ".dev" / "fidelity"
DOWNLOADS = TESTS.parent / ".dev" / "training"
MODELS = {
    "flux": (loading.load_demo_flux, loading.FLUX_FILE, 1.0),  # as Flux is run: without guidance
    "unet": (loading.load_demo_unet, loading.UNET_FILE, 2.5),
}


def prompts(count: int, held_out: bool) -> list[str]:
    """Tuning looks at one half of the subjects, the README's figures at the other."""
    subjects = sorted(captions.SUBJECTS)[1 if held_out else 0 :: 2]
    colours = list(captions.COLOURS)
    return [f"{subjects[i % len(subjects)]} on {colours[i * 5 % len(colours)]}" for i in range(count)]


def by_flops(family: str, point: Point, pairs: list[tuple[Drawn, Drawn]]) -> float:
    """Speed-up of the full-size model: by the schedule, and with a cache by what was evaluated and merged."""
    total = fullsize.parts(family).total()
    if point.cache is not None:
        spent = total * sum(drawn.evaluations for _, drawn in pairs)
        if point.settings:
            saved = total - fullsize.merged_total(family, point.settings)
            spent -= saved * sum(drawn.merged for _, drawn in pairs)
        return point.of_steps * len(pairs) * total / spent
    faster = 1.0
    if point.settings:
        faster = fullsize.speedup_by_flops(family, point.settings, point.steps, reuse=bool(point.reuse))
    if point.keys_and_values is not None:
        faster = total / (total - fullsize.saved_by_keys_and_values(family, point.keys_and_values))
    return faster * point.of_steps / point.steps


def rows_of(studio: Studio, chosen: list[Point], distances: Distances) -> tuple[list[dict], dict]:
    """A row a point, over the prompts that it was drawn for; and the first pictures of each, to look at."""
    rows, shown, references = [], {}, {}
    for point in sorted(chosen, key=lambda p: -p.of_steps):
        pairs = []
        for batch in studio.batches():
            base, drawn = studio.drawn(unmerged(point.of_steps), batch), studio.drawn(point, batch)
            if base is None or drawn is None:
                break
            pairs.append((base, drawn))
        if not pairs:
            continue
        reference, pictures = (torch.cat([pair[side].pictures for pair in pairs]) for side in (0, 1))
        # one tensor for all points of a reference: what was measured of it is known by that
        reference = references.setdefault((point.of_steps, len(pairs)), reference)
        names = studio.names[studio.first :][: len(pictures)]
        colours = torch.tensor([captions.COLOURS[name.split(" on ")[1]] for name in names]) / 255
        each = distances(reference, pictures, colours)
        flops = by_flops(studio.family, point, pairs)
        faster = [base.seconds / drawn.seconds for base, drawn in pairs]
        row = {
            "model": studio.family, "method": point.method, "label": point.label, "against": point.against,
            "tokens": (studio.pixels // loading.PIXELS_PER_TOKEN) ** 2, "settings": point.describe(),
            "held_out": studio.held_out, "first": studio.first, "prompts": len(names), "version": studio.version[:12],
            "steps": point.steps, "of_steps": point.of_steps, "cfg": studio.cfg, "speedup": flops,
            "measured": median(faster), "measured_spread": [min(faster), max(faster)],
            **{name: mean(values) for name, values in each.items()}, "each": each,
        }  # fmt: skip
        rows.append(row)
        shown.setdefault(f"unmerged, {point.of_steps} steps", reference[:8])
        of_steps = "" if point.of_steps == STEPS else f" of {point.of_steps} steps"
        against = f" ({point.against})" if point.against else ""
        shown[f"{point.method}{of_steps} {flops:.2f}x{against}"] = pictures[:8]
    return rows, shown


def unmerged(steps: int) -> Point:
    return Point("unmerged", steps=steps, of_steps=steps)


def with_references(chosen: list[Point]) -> list[Point]:
    return [unmerged(steps) for steps in dict.fromkeys(p.of_steps for p in chosen)] + chosen


def draw_all(studio: Studio, chosen: list[Point], until: float) -> None:
    """Batch by batch, first the points that decide and then the others, until all are there or time is up."""
    for some in ([p for p in chosen if p.decides], [p for p in chosen if not p.decides]):
        for batch in studio.batches():
            for point in with_references(some):
                if not studio.path(point, batch).is_file():
                    if time.monotonic() > until:
                        print(f"{studio.family}, {studio.pixels} px: time is up, not all is drawn", flush=True)
                        return
                    studio.draw(point, batch)
            drawn = studio.names.index(batch[-1]) + 1
            print(f"{studio.family}, {studio.pixels} px: {len(some)} methods, prompts to {drawn}", flush=True)


def earlier(paths: list[Path]) -> list[dict]:
    """The rows of files that this benchmark wrote."""
    rows = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["rows"]
            rows += [row for row in found if row["each"] and MODELS[row["model"]]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"--read {path}: not a file that this benchmark wrote ({error!r})") from None
    return joined(rows)


def main(argv: list[str] | None = None) -> None:
    options = checked(__doc__, argv)
    rows = measured(options) if options.read is None else earlier(options.read)
    if not rows:
        raise SystemExit("There are no rows, and nothing is written.")
    if options.write and {row["model"] for row in rows} != set(FAMILIES):
        raise SystemExit("--write: these are rows of one model only; the table wants both.")
    part = options.tries or options.only or options.first
    if not part:
        for family, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in rows):
            here = [row for row in rows if (row["model"], row["tokens"]) == (family, tokens)]
            report.plot(here, OUT / f"frontier-{family}-{tokens}-tokens.png")
    said = findings.findings(rows)
    print("\n".join(said))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "findings": said}, indent=1))
    if options.write:
        report.write_table(rows, options.write)
    print(f"Plots and contact sheets: {OUT.relative_to(TESTS.parent)}")


def measured(options: argparse.Namespace) -> list[dict]:
    """Draws what is missing, and measures it."""
    distances = Distances(DOWNLOADS, not options.no_inception)
    names = prompts(number_of_prompts(options), not options.tune)
    until = time.monotonic() + 60 * options.minutes
    rows = []
    for pixels in dict.fromkeys(options.pixels or ([128] if options.quick else [128, 256])):
        for family in dict.fromkeys(options.model or FAMILIES):
            load, weights, cfg = MODELS[family]
            weights = options.weights or weights
            cfg = cfg if options.cfg is None else options.cfg
            studio = Studio(OUT, family, pixels, cfg, load(weights), weights, names, not options.tune, options.first)
            chosen = chosen_points(family, options)
            draw_all(studio, chosen, until)
            found, shown = rows_of(studio, chosen, distances)
            rows += found
            report.print_table(found)
            if found and not (options.tries or options.first):
                report.sheet(shown, OUT / f"sheet-{family}-{pixels}.png")
                if presets := report.of_presets(shown):
                    report.sheet(presets, OUT / f"presets-{family}-{pixels}.jpg")
    return rows


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped; the same command goes on where it was.") from None
