"""Plots of the frontier, and contact sheets."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import torch
from comfyui_toma.toma_core.settings import DEFAULT
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .methods import METHODS, OUR_COLOURS, OURS, UNMERGED, Point
from .regimes import REGIMES, Regime
from .rows import of_regime, over_first
from .statistics import standard_error
from .studio import Studio

FASTEST = 5.0
COLUMNS = 3
SHOWN = 6  # prompts on a sheet
IN_README = 4  # on the image at the top of the README


def frontiers(rows: list[dict], folder: Path) -> None:
    """One image: a panel a regime, LPIPS against speed-up, a colour a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    there = [regime for regime in REGIMES if regime.speeds and of_regime(rows, regime)]
    if not there:
        return
    lines = ceil(len(there) / COLUMNS)
    figure, panels = plt.subplots(lines, COLUMNS, figsize=(4.6 * COLUMNS, 3.3 * lines), squeeze=False)
    for axes, regime in zip(panels.flat, there):
        _panel(axes, regime, of_regime(rows, regime))
    for axes in panels.flat[len(there) :]:
        axes.axis("off")
    handles: dict[str, object] = {}
    for axes in panels.flat:
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels())})
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=5, fontsize=10, frameon=False)
    figure.tight_layout(rect=(0, 0.11 if lines < 3 else 0.06, 1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "frontier.png", dpi=100)
    plt.close(figure)


def _panel(axes, regime: Regime, rows: list[dict]) -> None:
    """All points over the same prompts: those that our curve was drawn for."""
    count = min([row["prompts"] for row in rows if row["method"] == "tolerance"] or [row["prompts"] for row in rows])
    rows = [over_first(row, count) for row in rows if row["prompts"] >= count]
    colours = {**OUR_COLOURS, **{method.name: method.colour for method in METHODS}}
    names = {"tolerance": "ours"}
    curves: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["speedup"]):
        if row["lpips"] > 0 and 1.02 < row["speedup"] <= FASTEST * 1.05:
            curves.setdefault(names.get(row["method"], row["method"]), []).append(row)
    for name, curve in curves.items():
        if name not in colours:
            continue
        strong = name == "ours"
        error = [standard_error(row["each"]["lpips"][:count]) if count > 1 else 0 for row in curve]
        axes.errorbar(
            [row["speedup"] for row in curve], [row["lpips"] for row in curve], yerr=error, label=name,
            color=colours[name], elinewidth=1, marker="o",
            ms=5 if strong else 3.5, lw=2.8 if strong else 1.2, zorder=3 if strong else 2,
        )  # fmt: skip
    labels: list[tuple[tuple[float, float], list[str]]] = []
    for row in sorted(rows, key=lambda row: row["speedup"]):
        if row["method"] in OURS and row["lpips"] > 0:
            place = (row["speedup"], row["lpips"])
            axes.plot(*place, marker="*", ms=11, color=OUR_COLOURS["ours"], mec="white", zorder=4)
            near = (names for at, names in labels if abs(place[0] - at[0]) < 0.5 and 0.4 < place[1] / at[1] < 2.5)
            if names_there := next(near, None):
                names_there.append(row["method"])  # two labels would lie on one another
            else:
                labels.append((place, [row["method"]]))
    for place, names_there in labels:
        axes.annotate(", ".join(names_there), place, fontsize=7, xytext=(4, -9), textcoords="offset points")
    axes.set(xlim=(1, FASTEST), ylim=(1e-4, 0.5), yscale="log")
    axes.set_title(regime.describe(), fontsize=8)
    axes.set_xlabel("speed-up by FLOPs of the full-size model", fontsize=8)
    axes.set_ylabel("LPIPS to the unmerged image", fontsize=8)
    axes.grid(alpha=0.3, which="both")


def sheet(studio: Studio, points: list[Point], path: Path) -> None:
    """The first images of each point, a row each."""
    shown: dict[str, list[Tensor]] = {}
    for point in points:
        drawn = [studio.drawn(point, name).image for name in studio.names[:SHOWN] if studio.is_drawn(point, name)]
        if drawn:
            shown[f"{point.method}\n{point.setting}"] = drawn
    if shown:
        path.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(shown).save(path)


def before_and_after(studio: Studio, points: list[Point], folder: Path) -> None:
    """The image at the top of the README: the first prompts, plain and with the default preset."""
    plain, faster = (next(p for p in points if p.method == name) for name in (UNMERGED, DEFAULT))
    names = studio.names[:IN_README]
    if not all(studio.is_drawn(point, name) for point in (plain, faster) for name in names):
        return
    drawn = {point.method: [studio.drawn(point, name) for name in names] for point in (plain, faster)}
    ran = [sum(one.ran for one in some) for some in drawn.values()]
    titles = (f"plain, {studio.regime.steps} steps", f"ToMA, {DEFAULT}, {ran[0] / ran[1]:.1f}x")
    shown = {title: [one.image for one in some] for title, some in zip(titles, drawn.values())}
    sheet = contact_sheet(shown, margin=0)
    sheet = sheet.resize((1000, round(1000 * sheet.height / sheet.width)), Image.LANCZOS)
    band, font = 30, ImageFont.load_default(18)
    whole = Image.new("RGB", (sheet.width, sheet.height + 2 * band), "white")
    for row, title in enumerate(titles):
        half = sheet.height // 2
        whole.paste(sheet.crop((0, row * half, sheet.width, row * half + half)), (0, row * (half + band) + band))
        ImageDraw.Draw(whole).text((4, row * (half + band) + 4), title, "black", font)
    whole.save(folder / "before-and-after.jpg", quality=88)


def contact_sheet(shown: dict[str, list[Tensor]], margin: int = 170) -> Image.Image:
    """Images [H, W, 3] in rows, with the name of each row at the left."""
    height, width = next(iter(shown.values()))[0].shape[:2]
    count = max(len(images) for images in shown.values())
    whole = Image.new("RGB", (margin + count * width, len(shown) * height), "white")
    draw = ImageDraw.Draw(whole)
    for row, (name, images) in enumerate(shown.items()):
        if margin:
            draw.multiline_text((6, row * height + height // 2 - 14), name, fill="black")
        for column, image in enumerate(images):
            pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
            whole.paste(Image.fromarray(pixels), (margin + column * width, row * height))
    return whole
