"""Tables, plots and contact sheets."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from .findings import MODELS, speckle, standard_error
from .points import CACHE, CARRIED, ENDS, OURS, REUSE, RIVALS, STEPS

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
            error = [standard_error(row["each"][measure]) for row in line]
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
    wanted += [(name, against) for name in RIVALS for against in OURS]
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


def has_place(text: str) -> bool:
    """Whether a README has the markers that the table goes between."""
    return 0 <= text.find(BEGIN) < text.find(END)


def write_table(rows: list[dict], path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    between = f"{BEGIN}\n{markdown(rows)}\n{END}"
    path.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: between, text, flags=re.S), encoding="utf-8")
