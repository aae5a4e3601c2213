"""Two pictures: speed-up against ratio, and cost against resolution. Of rows alike, the first counts: what was
measured comes before what was computed."""

from __future__ import annotations

from pathlib import Path

MODELS = ("SDXL", "Flux")
LOOKS = {
    "toma": {"color": "#1f77b4", "marker": "o"},
    "shorter": {"color": "#777777", "marker": "", "linestyle": "--"},
    "tomesd": {"color": "#d62728", "marker": "s"},
    "tomesd attention": {"color": "#ff9896", "marker": "s"},
}
NAMES = {"toma": "ToMA", "shorter": "shorter sequence (limit)", "tomesd": "tomesd's matching, whole block"}
NAMES["tomesd attention"] = "tomesd's matching, attention"


def draw(rows: list[dict], folder: Path, stem: str) -> list[Path]:
    """Writes `stem`-ratio and `stem`-resolution as PNG and SVG; nothing where there are no rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for name, panel in (("ratio", _by_ratio), ("resolution", _by_resolution)):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        drawn = [panel(axis, model, [r for r in rows if r["model"] == model]) for axis, model in zip(axes, MODELS)]
        for suffix in ("png", "svg") if any(drawn) else ():
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{stem}-{name}.{suffix}")
            figure.savefig(written[-1], dpi=144)
        plt.close(figure)
    return written


def _by_ratio(axis, model: str, rows: list[dict]) -> bool:
    steps = [r for r in rows if r["part"] == "step" and r["size"] == "1024x1024" and r["batch"] == 1]
    for method, look in LOOKS.items():
        points = sorted({r["ratio"]: r["speedup"] for r in reversed(steps) if r["method"] == method}.items())
        if points:
            axis.plot(*zip((0.0, 1.0), *points), label=NAMES[method], **look)
    ideals = sorted({r["ratio"]: r["ideal"] for r in reversed(steps) if r["method"] == "toma"}.items())
    if ideals:
        axis.plot(
            *zip((0.0, 1.0), *ideals),
            color="#1f77b4",
            alpha=0.4,
            linewidth=6,
            label="ideal by FLOPs",
            zorder=0,
        )
    for row in steps:
        if row["method"] in ("todo", "HyperTile depth 2") and row["speedup"]:
            axis.axhline(row["speedup"], color="#aaaaaa", linewidth=0.8)
            axis.annotate(row["method"], (0.75, row["speedup"]), fontsize=7, va="bottom", ha="right")
    axis.set(title=f"{model}, 1024 px", xlabel="share of tokens merged away", ylabel="speed-up of a step")
    axis.grid(alpha=0.3)
    if ideals:
        axis.legend(fontsize=7)
    return bool(ideals)


def _by_resolution(axis, model: str, rows: list[dict]) -> bool:
    square = [r for r in rows if r["part"] == "step" and r["batch"] == 1 and len(set(r["size"].split("x"))) == 1]
    drawn = False
    for method, ratio in (("none", None), ("toma", 0.5), ("shorter", 0.5)):
        here = [r for r in square if r["method"] == method and r["ratio"] == ratio]
        points = sorted({int(r["size"].split("x")[0]): r["seconds"] for r in reversed(here)}.items())
        if len(points) > 1:
            label = "no node" if method == "none" else f"{NAMES[method]}, ratio {ratio}"
            axis.plot(*zip(*points), label=label, **LOOKS.get(method, {"color": "black", "marker": "^"}))
            drawn = True
    axis.set(title=f"{model}", xlabel="side in pixels", ylabel="seconds a step", xscale="log", yscale="log")
    axis.set_xticks([512, 768, 1024, 1536, 2048], labels=["512", "768", "1024", "1536", "2048"], minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    if drawn:
        axis.legend(fontsize=7)
    return drawn
