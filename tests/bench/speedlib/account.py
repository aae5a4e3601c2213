"""From samples to speed-ups of the whole models, and of presets in the regimes that were drawn."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import fullsize

from .measure import Seconds

DEPTH = {"double": fullsize.FLUX_DOUBLE, "single": fullsize.FLUX_SINGLE}
ROWS = {640: 2, 1280: 10}  # blocks in a spatial transformer of this width
BEGIN, END = "<!-- speed: made by `python dev.py bench speed --write`, not by hand -->", "<!-- /speed -->"


def flux_step(sample: Seconds, blocks: tuple[int, int]) -> float:
    """The 19 + 38 model of a sample with so many double and single blocks."""
    measured = dict(zip(DEPTH, blocks))
    return sample["outside"] + sum(sample[kind] * DEPTH[kind] / measured[kind] for kind in DEPTH)


def flux_speedup(mine: list[Seconds], none: list[Seconds], blocks: tuple[int, int]) -> float:
    return median(flux_step(s, blocks) for s in none) / median(flux_step(s, blocks) for s in mine)


def unet_speedup(rows: dict[int, tuple[list[Seconds], list[Seconds]]], size: fullsize.Size = fullsize.FULL) -> float:
    """SDXL's step from its two kinds of rows {width: (samples of a method, samples of no node)}: each row by what it
    was measured to save, convolutions as they are, by their shares of the FLOPs."""
    counted = fullsize.parts("unet", size)
    left = 1.0
    for channels, (mine, none) in rows.items():
        share = fullsize.share(counted, f"blocks of {channels}")
        left -= share * (1 - median(s["row"] for s in mine) / median(s["row"] for s in none))
    return 1 / left


def presets(rows: Iterable[dict], merged: dict[tuple[str, float], float], names: Iterable[str]) -> list[dict]:
    """Speed-up of each preset in each regime, by the kinds of steps that a drawn run had (`rows` of the fidelity
    benchmark) and the measured speed-up of a merged step, {(family, ratio): speed-up}."""
    found = []
    for row in rows:
        if row["method"] not in names or not row["held_out"] or not row["kinds"]:
            continue
        family = "unet" if row["regime"].startswith("unet") else "flux"
        full, some = row["kinds"].count("F"), row["kinds"].count("M")
        each = merged.get((family, row["settings"]["ratio"]))
        if some and each is None:
            continue
        work = full + (some / each if some else 0.0)
        found.append({"regime": row["regime"], "preset": row["method"], "speedup": len(row["kinds"]) / work})
    return found


def markdown(steps: list[dict], runs: list[dict]) -> str:
    lines = ["| a step at 1024 px | SDXL | Flux |", "| --- | --- | --- |"]
    for key in dict.fromkeys(row["method"] for row in steps):
        cells = []
        for family in ("unet", "flux"):
            row = next((r for r in steps if (r["method"], r["family"]) == (key, family)), None)
            ideal = f" (by FLOPs {row['ideal']:.2f}x)" if row and row["ideal"] else ""
            cells.append(f"{row['speedup']:.2f}x{ideal}" if row else "")
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    names = list(dict.fromkeys(run["preset"] for run in runs))
    if names:
        lines += [
            "",
            "| a run | " + " | ".join(f"`{name}`" for name in names) + " |",
            "| --- |" + " --- |" * len(names),
        ]
    for regime in dict.fromkeys(run["regime"] for run in runs):
        found = {run["preset"]: f"{run['speedup']:.2f}x" for run in runs if run["regime"] == regime}
        lines.append(f"| {regime} | " + " | ".join(found.get(name, "") for name in names) + " |")
    return "\n".join(lines)
