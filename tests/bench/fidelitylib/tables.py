"""The rows as text: on the terminal, and as the tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from . import methods
from .measures import SAME
from .methods import OTHER_SEED, OURS, UNMERGED
from .regimes import ONE_TOLERANCE, REGIMES, Regime
from .rows import base_of, losses, of_regime, over_first
from .statistics import at_speed, differs, interval

BEGIN, END = "<!-- fidelity: made by `python dev.py bench fidelity --write`, not by hand -->", "<!-- /fidelity -->"
README_BEGIN, README_END, README_REGIMES = "<!-- presets -->", "<!-- /presets -->", ("flux-20", "flux-8", "unet-sde-25")
CURVE = "tolerance"  # ours, at any speed
BOUND, BOUND_WITH_NOISE = 0.05, 0.10  # LPIPS that `balanced` may be off
GROUPS = {
    "Flux, 1024 tokens": lambda r: r.family == "flux" and r.tokens == 1024,
    "SDXL's UNet, 1024 tokens": lambda r: r.family == "unet" and r.tokens == 1024,
    "4096 tokens": lambda r: r.tokens == 4096,
}


def print_rows(regime: Regime, rows: list[dict]) -> None:
    print(f"\n{regime.name}: {regime.describe()}")
    for row in rows:
        inception = f"  inception {row['inception']:.4f}" if "inception" in row else ""
        print(
            f"  {row['method'] + ' ' + row['setting']:44}{row['speedup']:6.2f}x {row['psnr']:6.1f} dB  "
            f"lpips {row['lpips']:.4f}{inception}  subject {row['subject']:.0%}  likeness {row['likeness']:.4f}  "
            f"speckle {row['speckle']:.4f}  {row['prompts']} prompts  {row['kinds']}"
        )


# --------------------------------------------------------------------------- what rows say


def apart(rows: list[dict], rival: dict) -> list[float] | None:
    """LPIPS of ours at the rival's speed-up less the rival's, prompt by prompt; None if ours doesn't go that fast."""
    curve = [r for r in of_regime(rows, rival["regime"], rival["held_out"]) if r["method"] == CURVE]
    ours = at_speed(curve, rival["speedup"], "lpips", rival["prompts"])
    return None if ours is None else [a - b for a, b in zip(ours, rival["each"]["lpips"])]


def verdicts(rows: list[dict]) -> Iterator[str]:
    """A line a regime for what the presets reach, and one for each rival that ours is not closer than."""
    for regime in REGIMES:
        for held_out in (True, False):
            here = of_regime(rows, regime, held_out)
            rivals = [r for r in here if r["method"] in methods.BY_NAME and r["speedup"] > 1.02]
            pairs = [(row, found) for row in rivals if (found := apart(rows, row))]
            behind = [(row, found) for row, found in pairs if differs(found) > 0]
            even = sum(differs(found) == 0 for _, found in pairs)
            if not here:
                continue
            prompts = "held-out" if held_out else "tuning"
            yield f"{regime.name}, {prompts} prompts: closer than {len(pairs) - len(behind) - even} of {len(pairs)}"
            yield f"  rivals' points, even with {even}, behind {len(behind)}"
            for row, found in behind:
                yield (
                    f"  BEHIND {row['method']} {row['setting']} at {row['speedup']:.2f}x: "
                    f"LPIPS {mean(found):+.4f} ± {interval(found):.4f}"
                )
            for name in OURS:
                yield from (f"  {line}" for line in _preset(rows, regime, held_out, name))


def _preset(rows: list[dict], regime: Regime, held_out: bool, name: str) -> Iterator[str]:
    for row in of_regime(rows, regime, held_out):
        if row["method"] == name:
            bound = BOUND_WITH_NOISE if regime.adds_noise else BOUND
            far = "" if row["lpips"] <= bound else f", beyond {bound:g}"
            yield f"{name}: {_cell(row)}{far}; {_goodness(rows, row)}"


def _goodness(rows: list[dict], row: dict) -> str:
    base = base_of(rows, row)
    if base is None:
        return ""
    lost = losses(row, base)
    return "worse: " + ", ".join(f"{name} {share:+.0%}" for name, share in lost.items()) if lost else "as good"


# --------------------------------------------------------------------------- docs/benchmarks.md


def markdown(rows: list[dict]) -> str:
    held_out = [row for row in rows if row["held_out"]]
    there = [regime for regime in REGIMES if regime.speeds and of_regime(held_out, regime)]
    parts = ["### Presets", "", ABOUT_PRESETS, "", *_presets_table(held_out, there)]
    parts += ["", "### Others at the same speed", "", ABOUT_RIVALS]
    for title, belongs in GROUPS.items():
        some = [regime for regime in there if belongs(regime)]
        lines = _rivals_table(held_out, some)
        if len(lines) > 2:
            parts += ["", f"**{title}**", "", *lines]
    parts += ["", "### One tolerance, one closeness", "", ABOUT_TOLERANCE, "", *_tolerance_table(held_out)]
    parts += ["", "### What merging adds", "", ABOUT_MERGING, "", *_merging_table(held_out, there)]
    parts += ["", "### As good by itself?", "", ABOUT_GOOD, "", *_good_table(held_out, there)]
    return "\n".join(parts)


ABOUT_PRESETS = (
    "Each cell: speed-up, PSNR and LPIPS, means over the prompts. An image that is the same as unmerged counts as "
    f"{SAME:g} dB."
)
ABOUT_RIVALS = (
    "Each cell: the rival's speed-up, its LPIPS, and ours at that speed-up (between two points of our tolerance "
    "curve). **Bold**: ours is not closer beyond chance (95 %, in pairs)."
)
ABOUT_TOLERANCE = (
    f"The tolerance of `{ONE_TOLERANCE}` over other lengths and samplers. With samplers that add noise another image "
    "comes out after any change, and the distance is that of another image."
)
ABOUT_MERGING = (
    "The same tolerance without and with tokens merged where forecasts fail (ratio 0.5 on the UNet, 0.35 on Flux), "
    "and at the usual speed merging alone. Each cell: speed-up, PSNR, LPIPS. It pays in few steps on the UNet, where "
    "hardly anything can be forecast, so `fast` merges there; elsewhere a higher tolerance is closer at that speed, "
    "and presets leave it out."
)
ABOUT_GOOD = (
    "Retrieval: share of images whose nearest training image is that of the caption's subject, and whose background "
    "is the caption's colour. Likeness: LPIPS to that training image (lower is better). Speckle: unevenness of plain "
    "background. Frechet: distance of Inception features to the training images and to unmerged images of other "
    "seeds, with how much it is above the unmerged images' own and the standard error of that."
)


def _presets_table(rows: list[dict], there: list[Regime]) -> list[str]:
    lines = ["| regime | " + " | ".join(f"`{name}`" for name in OURS) + " | prompts |"]
    lines.append("| --- |" + " --- |" * (len(OURS) + 1))
    for regime in there:
        found = {row["method"]: row for row in of_regime(rows, regime) if row["method"] in OURS}
        cells = [_cell(found[name]) + _mark(rows, found[name]) if name in found else "" for name in OURS]
        if any(cells):
            prompts = min(row["prompts"] for row in found.values())
            lines.append(f"| {regime.describe()} | " + " | ".join(cells) + f" | {prompts} |")
    return lines


def _mark(rows: list[dict], row: dict) -> str:
    told = _goodness(rows, row)
    return f" ({told})" if told.startswith("worse") else ""


def _rivals_table(rows: list[dict], there: list[Regime]) -> list[str]:
    """A row a rival, a column a regime, at the speed-up that people would want there."""
    lines = ["| | " + " | ".join(regime.name for regime in there) + " |", "| --- |" + " --- |" * len(there)]
    for method in methods.METHODS:
        cells = []
        for regime in there:
            speed = methods.usual_speed(regime)
            found = [r for r in of_regime(rows, regime) if r["method"] == method.name and r["speedup"] > 1.02]
            best = min(found, key=lambda r: abs(r["speedup"] - speed), default=None)
            cells.append("" if best is None else _rival_cell(rows, best))
        if any(cells):
            lines.append(f"| {method.name} | " + " | ".join(cells) + " |")
    return lines


def _rival_cell(rows: list[dict], row: dict) -> str:
    found = apart(rows, row)
    text = f"{row['speedup']:.2f}x: {_short(row['lpips'])}"
    if found is None:
        return f"{text} / -"
    text += f" / {_short(row['lpips'] + mean(found))}"
    return text if differs(found) < 0 else f"**{text}**"


def _tolerance_table(rows: list[dict]) -> list[str]:
    """Schedule `simple` and 1024 tokens, cfg as where the presets are looked at with Euler."""
    lines = ["| regime | speed-up | PSNR | LPIPS | prompts |", "| --- | --- | --- | --- | --- |"]
    for regime in sorted(REGIMES, key=lambda r: (r.model, r.adds_noise, r.sampler, r.steps)):
        if regime.tokens != 1024 or regime.scheduler != "simple" or regime.cfg > 2.5 or regime.model == "student":
            continue
        for row in of_regime(rows, regime):
            if row["method"] == ONE_TOLERANCE:
                psnr = "the same" if row["psnr"] >= SAME else f"{row['psnr']:.1f} dB"
                cells = (f"{row['speedup']:.2f}x", psnr, _short(row["lpips"]), str(row["prompts"]))
                lines.append(f"| {regime.describe()} | " + " | ".join(cells) + " |")
    return lines


def _merging_table(rows: list[dict], there: list[Regime]) -> list[str]:
    lines = ["| regime | tolerance | forecast | and merging | merging alone |", "| --- | --- | --- | --- | --- |"]
    for regime in there:
        here = of_regime(rows, regime)
        forecast = {row["setting"]: row for row in here if row["method"] == CURVE}
        alone = [row for row in here if row["method"] == "merged alone"]
        alone = min(alone, key=lambda row: abs(row["speedup"] - methods.usual_speed(regime)), default=None)
        for row in here:
            if row["method"] == methods.MERGING and row["setting"] in forecast:
                some = [forecast[row["setting"]], row, *([alone] if alone else [])]
                count = min(one["prompts"] for one in some)  # the same prompts for all of a line
                cells = [row["setting"], *(_cell(over_first(one, count)) for one in some), *([] if alone else [""])]
                lines.append(f"| {regime.name} | " + " | ".join(cells) + " |")
    return lines


def _good_table(rows: list[dict], there: list[Regime]) -> list[str]:
    lines = [
        "| regime | method | subject | colour | likeness | speckle | Frechet, training | Frechet, other seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for regime in there:
        for row in of_regime(rows, regime):
            if row["method"] not in (UNMERGED, OTHER_SEED, *OURS):
                continue
            far = [_frechet(row["frechet"].get(name), row["method"]) for name in ("training", "others")]
            if row["method"] == OTHER_SEED:
                far[1] = ""  # to itself
            good = f"{row['subject']:.0%} | {row['colour']:.0%} | {row['likeness']:.4f} | {row['speckle']:.4f}"
            lines.append(f"| {regime.name} | {row['method']} | {good} | {far[0]} | {far[1]} |")
    return lines


def _frechet(told: dict | None, method: str) -> str:
    if not told:
        return ""
    above = "" if method == UNMERGED else f" ({told['above']:+.2g} ± {told['error']:.2g})"
    return f"{told['value']:.3g}{above}"


def _cell(row: dict) -> str:
    if row["psnr"] >= SAME:
        return f"{row['speedup']:.2f}x: the same image"
    return f"{row['speedup']:.2f}x: {row['psnr']:.1f} dB, {_short(row['lpips'])}"


def _short(value: float) -> str:
    return f"{value:.3f}".lstrip("0") if value >= 0.001 else f"{value:.4f}".lstrip("0")


def has_place(text: str) -> bool:
    """Whether a page has the markers that the tables go between, or the README's table of presets."""
    return 0 <= text.find(BEGIN) < text.find(END) or 0 <= text.find(README_BEGIN) < text.find(README_END)


def between(text: str) -> str:
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def readme_cells(rows: list[dict], preset: str) -> list[str]:
    """What the README's table says of a preset."""
    found = {(row["regime"], row["method"]): row for row in rows if row["held_out"]}
    cells = [found[regime, preset] for regime in README_REGIMES]
    return [f"{row['speedup']:.1f}x, {row['lpips']:.4f}" for row in cells]


def _with_readme_cells(rows: list[dict], text: str) -> str:
    before, table = text.split(README_BEGIN)
    table, after = table.split(README_END)
    lines = table.splitlines(keepends=True)
    for i, line in enumerate(lines):
        name = line.split("`")[1] if "`" in line else ""
        if name in OURS:
            kept = line.split("|")[: -1 - len(README_REGIMES)]
            lines[i] = "|".join([*kept, *(f" {cell} " for cell in readme_cells(rows, name)), "\n"])
    return before + README_BEGIN + "".join(lines) + README_END + after


def write(rows: list[dict], path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if README_BEGIN in text:
        path.write_text(_with_readme_cells(rows, text), encoding="utf-8")
        return
    made = f"{BEGIN}\n\n{markdown(rows)}\n\n{END}"
    path.write_text(
        re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.S), encoding="utf-8"
    )
