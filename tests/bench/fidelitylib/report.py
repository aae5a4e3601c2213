"""Table, plots, contact sheets, and what the figures say about the aims."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from statistics import mean, median, stdev

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from .points import CACHE, CARRIED, ENDS, FEW, OURS, REUSE, STEPS

__all__ = ["mean", "median", "print_table", "joined", "findings", "plot", "sheet", "write_table"]

MODELS = {"flux": "Flux", "unet": "SDXL's UNet"}
TOLD = {"reuse": "full steps reused", "reuse with drift": "full steps reused along their drift"}
BEGIN, END = "<!-- fidelity -->", "<!-- /fidelity -->"


def print_table(rows: list[dict]) -> None:
    for row in rows:
        inception = f"  inception {row['inception']:.4f}" if "inception" in row else ""
        print(
            f"{row['model']:5}{row['tokens']:5} {row['label'] or row['method']:62}{row['speedup']:6.2f}x "
            f"(demo {row['measured']:.2f}x) {row['psnr']:6.1f} dB  ssim {row['ssim']:.3f}  lpips {row['lpips']:.4f}"
            f"{inception}  speckle x{speckle(row):.2f}"
        )


def speckle(row: dict) -> float:
    """Variance between neighbouring tokens on flat background, over that of the unmerged picture."""
    return row["speckle"] / max(row["speckle_unmerged"], 1e-12)


def paired(ours: dict, other: dict, measure: str) -> tuple[float, float]:
    """Mean of ours - other over the prompts, and its standard error."""
    apart = [a - b for a, b in zip(ours["each"][measure], other["each"][measure])]  # of the prompts both have
    return mean(apart), stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")


def joined(rows: list[dict]) -> list[dict]:
    """The rows, where those of one point that were drawn in parts (`--from`) are one; where parts overlap the later
    one counts."""
    points: dict[str, list[dict]] = {}
    for row in rows:
        about = ("model", "tokens", "method", "against", "settings", "of_steps", "cfg")
        points.setdefault(json.dumps([row[name] for name in about], sort_keys=True), []).append(row)
    found = [reduce(_followed_by, sorted(parts, key=_first)) for parts in points.values()]
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in found):
        begin = {_first(row) for row in found if (row["model"], row["tokens"]) == (model, tokens)}
        if len(begin) > 1:
            raise SystemExit(
                f"{MODELS[model]}, {tokens} tokens: rows begin at different prompts ({sorted(begin)}) and can't be "
                "compared. Read the files with their first prompts, too."
            )
    return found


def _first(row: dict) -> int:
    return row.get("first", 0)


def _followed_by(row: dict, more: dict) -> dict:
    count = _first(more) - _first(row)
    if not 0 < count <= row["prompts"]:
        raise SystemExit(
            f"{row['label']} on {row['model']}, {row['tokens']} tokens: prompts {_first(row)} to "
            f"{_first(row) + row['prompts']} and from {_first(more)} on are no parts of one row."
        )
    each = {name: row["each"][name][:count] + values for name, values in more["each"].items()}
    spread = row["measured_spread"] + more["measured_spread"]
    return {
        **row,
        "prompts": count + more["prompts"],
        **{name: _faster(row[name], count, more[name], more["prompts"]) for name in ("speedup", "measured")},
        "measured_spread": [min(spread), max(spread)],
        **{name: mean(values) for name, values in each.items()},
        "each": each,
    }


def _faster(first: float, count: int, second: float, more: int) -> float:
    """Speed-up of two parts of a run after one another."""
    return (count + more) / (count / first + more / second)


def over_same_prompts(*rows: dict) -> list[dict]:
    """The rows with their means over the prompts that all of them have."""
    count = min(row["prompts"] for row in rows)
    cut = [{name: values[:count] for name, values in row["each"].items()} for row in rows]
    return [
        {**row, **{name: mean(values) for name, values in each.items()}, "each": each, "prompts": count}
        for row, each in zip(rows, cut)
    ]


def findings(rows: list[dict]) -> list[str]:
    """One line for each aim of the fidelity work, met or not, with its figures."""
    lines = []
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["tokens"]) == (model, tokens)]
        lines.append(f"{MODELS[model]}, {tokens} tokens, {mine[0]['prompts']} prompts")
        lines += [f"  {line}" for line in _findings(mine)]
    return lines


def _findings(rows: list[dict]) -> list[str]:
    lines = []

    def find(method: str, against: str = "", of_steps: int = STEPS) -> dict | None:
        found = (r for r in rows if (r["method"], r["against"], r["of_steps"]) == (method, against, of_steps))
        return next(found, None)

    def say(met: bool, text: str, decided: bool = True) -> None:
        lines.append(f"{('met   ' if met else 'MISSED') if decided else 'even  '} {text}")

    for row in rows:
        ours = find(row["against"]) if row["against"] else None
        if ours:
            (lp, lp_error), (db, db_error) = (paired(ours, row, m) for m in ("lpips", "psnr"))
            say(
                lp < 0 < db,
                f"{ours['method']} closer than {row['method']} at {row['speedup']:.2f}x: "
                f"LPIPS {lp:+.4f} ± {lp_error:.4f}, PSNR {db:+.1f} ± {db_error:.1f} dB"
                + (f" ({row['prompts']} prompts)" if row["prompts"] < ours["prompts"] else ""),
                decided=abs(lp) > 2 * lp_error and abs(db) > 2 * db_error,
            )
    quality, balanced, fast = (find(name) for name in OURS)
    if quality and (paper := find("paper", "quality")):
        text = f"quality at {quality['speedup']:.2f}x has {quality['lpips'] / paper['lpips']:.2f} of paper's LPIPS"
        say(quality["speedup"] >= 1.2 and quality["lpips"] <= 0.5 * paper["lpips"], text)
    if balanced and (paper := find("paper", "1.25x")):
        text = f"balanced at {balanced['speedup']:.2f}x: LPIPS {balanced['lpips']:.4f}, {balanced['psnr']:.1f} dB; "
        text += f"paper at {paper['speedup']:.2f}x: {paper['lpips']:.4f}, {paper['psnr']:.1f} dB"
        closer = balanced["lpips"] <= paper["lpips"] and balanced["psnr"] >= paper["psnr"]
        say(balanced["speedup"] >= 1.4 and closer, text)
    if fast and (paper := find("paper", "fast")):
        gain = fast["psnr"] - paper["psnr"]
        say(
            fast["speedup"] >= 1.8 and gain >= 2,
            f"fast at {fast['speedup']:.2f}x is {gain:.1f} dB above paper",
        )
    if balanced:
        added = speckle(balanced) - 1
        say(
            added <= 2, f"balanced adds {added:.2f} times the unmerged speckle ({added + 1:.2f} times in all)"
        )
    for short, dropped in FEW:
        merged, fewer = find("short run", "", short), find("short run, fewer steps", "", short)
        if merged and fewer:
            text = f"of {short} steps, merged at {merged['speedup']:.2f}x: LPIPS {merged['lpips']:.4f}, "
            text += f"{merged['psnr']:.1f} dB; {dropped} steps ({fewer['speedup']:.2f}x): "
            text += f"{fewer['lpips']:.4f}, {fewer['psnr']:.1f} dB"
            text += f" ({merged['prompts']} prompts)"
            say(merged["lpips"] < fewer["lpips"] and merged["psnr"] > fewer["psnr"], text)
    for first in ("easycache", "60 % of the steps"):
        alone, both = find(first), find(f"balanced on {first}")
        if balanced and alone and both:
            alone, merged, both = over_same_prompts(alone, balanced, both)
            kept = both["speedup"] / alone["speedup"]
            far = [root_error(row) for row in (alone, merged, both)]
            over = [b - a - m for a, m, b in zip(*(row["each"]["lpips"] for row in (alone, merged, both)))]
            error = _standard_error(over)
            text = f"balanced on {first}: {kept:.2f}x on top of {alone['speedup']:.2f}x; LPIPS {both['lpips']:.4f} "
            text += f"of {alone['lpips']:.4f} + {merged['lpips']:.4f} ({mean(over):+.4f} ± {error:.4f}), "
            text += (
                f"root mean square {far[2]:.4f} of {far[0]:.4f} + {far[1]:.4f} ({both['prompts']} prompts)"
            )
            kept_up = kept >= 0.9 * merged["speedup"] and far[2] < far[0] + far[1]
            say(kept_up and mean(over) < 0, text, decided=not kept_up or abs(mean(over)) > 2 * error)
    return lines


def root_error(row: dict) -> float:
    return mean(10 ** (-value / 20) for value in row["each"]["psnr"])


# --------------------------------------------------------------------------- to look at


def plot(rows: list[dict], path: Path) -> None:
    """Distance against speed-up: LPIPS and PSNR."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["of_steps"] == STEPS and "balanced on" not in row["method"]]
    if not rows:
        return
    names = {**dict.fromkeys((*OURS, *ENDS), "ours"), "60 % of the steps": "fewer steps"}
    lines: dict[str, list[dict]] = {"ours": []}
    for row in sorted(rows, key=lambda row: row["speedup"]):
        lines.setdefault(names.get(row["method"], row["method"]), []).append(row)
    about = max(rows, key=lambda row: row["prompts"])
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6))
    for axes, measure, title in zip(
        both, ("lpips", "psnr"), ("LPIPS (lower is closer)", "PSNR, dB (higher is closer)")
    ):
        colours = plt.get_cmap("tab20").colors
        axes.set_prop_cycle(color=colours[::2] + colours[1::2])
        for name, line in filter(lambda item: item[1], lines.items()):
            style = {"lw": 2.6, "zorder": 3} if name == "ours" else {"lw": 1.2, "alpha": 0.8}
            error = [_standard_error(row["each"][measure]) for row in line]
            xs, ys = [row["speedup"] for row in line], [row[measure] for row in line]
            count = min(row["prompts"] for row in line)
            told = name if count == about["prompts"] else f"{name} ({count} prompts)"
            axes.errorbar(xs, ys, yerr=error, marker="o", ms=4, capsize=2, label=told, **style)
            if name == "ours":
                for x, y, row in zip(xs, ys, line):
                    axes.annotate(
                        row["method"].replace("toma at ", ""),
                        (x, y),
                        fontsize=7,
                        xytext=(3, 5),
                        textcoords="offset points",
                    )
        axes.set(xlabel="speed-up by FLOPs of the full-size model", title=title)
        if measure == "lpips":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.legend(*both[0].get_legend_handles_labels(), fontsize=7, loc="lower center", ncols=6)
    figure.suptitle(
        f"Demo model of {MODELS[about['model']]}, {about['tokens']} tokens, {about['prompts']} prompts, {STEPS} steps",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _standard_error(values: list[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def sheet(shown: dict[str, Tensor], path: Path, margin: int = 170) -> None:
    """Pictures [B, H, W, 3] of each method, a row each, with its name at the left."""
    height, width = next(iter(shown.values())).shape[1:3]
    count = max(len(pictures) for pictures in shown.values())
    whole = Image.new("RGB", (margin + count * width, len(shown) * height), "white")
    draw = ImageDraw.Draw(whole)
    for row, (name, pictures) in enumerate(shown.items()):
        draw.multiline_text((6, row * height + height // 2 - 14), name.replace(" (", "\n("), fill="black")
        for column, picture in enumerate(pictures):
            pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
            whole.paste(Image.fromarray(pixels), (margin + column * width, row * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.save(path, quality=88)


def of_presets(shown: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all that was drawn what the README shows: unmerged, each preset, and the paper's way."""
    rows = [f"unmerged, {STEPS} steps", *(f"{name} " for name in OURS)]
    found = [name for row in rows for name in shown if name.startswith(row) and " on " not in name]
    found += [name for name in shown if name.startswith("paper") and name.endswith(("(quality)", "(fast)"))]
    return {name: shown[name] for name in found}


def markdown(rows: list[dict]) -> str:
    """The README's table: a row a method, a column of speed-up, PSNR and LPIPS for each model and size, and the
    number of prompts where it is not the column's."""
    runs = list(dict.fromkeys((row["model"], row["tokens"]) for row in rows))
    most = {run: max(row["prompts"] for row in rows if (row["model"], row["tokens"]) == run) for run in runs}
    heads = [f"{MODELS[m]}, {n} tokens, {most[m, n]} prompts" for m, n in runs]
    wanted = [(name, "") for name in OURS] + [("paper", name) for name in (*OURS, "1.25x")]
    wanted += [
        (name, against)
        for name in ("tomesd", "pooling", "random", "regular")
        for against in ("quality", "fast")
    ]
    wanted += [(f"{name}{CARRIED}", "balanced") for name in ("random", "regular")]
    wanted += [(method, name) for method in REUSE.values() for name in OURS]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]

    def cell(found: list[dict]) -> str:
        if not found:
            return ""
        row = found[0]
        fewer = f" ({row['prompts']})" if row["prompts"] < most[row["model"], row["tokens"]] else ""
        return f"{row['speedup']:.2f}x: {row['psnr']:.1f} dB, {_short(row['lpips'])}{fewer}"

    def line(name: str, pick) -> None:
        cells = [cell([r for r in rows if (r["model"], r["tokens"]) == run and pick(r)]) for run in runs]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for method, against in wanted:
        name = f"`{method}`" if method in (*OURS, "paper") else TOLD.get(method, method)
        if method.endswith(CARRIED):
            name = f"`{against}` with {method.removesuffix(CARRIED)} picks"
        elif against:
            name += f", as fast as `{against}`" if against in OURS else f" at {against}"
        line(name, lambda r, m=method, a=against: r["method"] == m and r["against"] == a)
    line(f"EasyCache, threshold {CACHE:g}", lambda r: r["method"] == "easycache")
    for steps in (17, 13, 10):
        line(
            f"no merging, {steps} of the {STEPS} steps",
            lambda r, s=steps: r["method"] == "fewer steps" and r["steps"] == s,
        )
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.3f}".lstrip("0") if value >= 0.001 else f"{value:.4f}".lstrip("0")


def write_table(rows: list[dict], path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{path.name} has no {BEGIN} ... {END} to write between.")
    between = f"{BEGIN}\n{markdown(rows)}\n{END}"
    path.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: between, text, flags=re.S), encoding="utf-8")
