"""ESTIMATES for GPUs, which cannot be measured here: a roofline over the counted work of one evaluation.

    python dev.py bench roofline [--size 1024x1024]

Each kernel takes as long as its arithmetic or its memory traffic, whichever is longer, but not less than a
kernel takes at all; and a step takes no less than the host needs to launch its kernels. All constants are here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True)
class Card:
    """Dense half-precision tensor throughput with fp32 accumulation, as PyTorch uses it, and memory bandwidth."""

    name: str
    flops: float
    bandwidth: float
    source: str


# Tensor cores do 512 FLOPs a clock and SM (half precision in, fp32 accumulation, dense) on GeForce of both
# generations: NVIDIA's GA102 whitepaper (RTX 3090: 82 SMs at 1.695 GHz, 71 TFLOPS) and Ada whitepaper, appendix
# A (RTX 4090: 165.2 TFLOPS, 1008 GB/s). H100: NVIDIA's H100 whitepaper and data sheet, SXM5, dense, 3.35 TB/s.
CARDS = (
    Card("RTX 3060", 28 * 1.777e9 * 512, 360e9, "28 SMs at 1.777 GHz; 192 bit at 15 Gb/s"),
    Card("RTX 4090", 128 * 2.52e9 * 512, 1008e9, "128 SMs at 2.52 GHz; 384 bit at 21 Gb/s"),
    Card("H100 SXM", 989.4e12, 3350e9, "data sheet"),
)

# What real kernels reach of the peaks. Assumptions, chosen once and not fitted to any figure below.
ARITHMETIC = 0.65  # of the peak, large half-precision matrix products, convolutions, attention
TRAFFIC = 0.80  # of the bandwidth, element-wise kernels
KERNEL = 3e-6  # seconds that the shortest kernel takes
LAUNCH = 7e-6  # seconds of the host for one operation of eager PyTorch

# Lu et al., ICML 2025, arXiv 2509.10918: 1024 px, relative change of the latency
PUBLISHED = {"unet": -0.24, "flux": -0.23}

BATCH = {"unet": 2, "flux": 1}  # SDXL is run with a negative prompt, in one batch with the prompt


def seconds(work, card: Card) -> float:
    """Estimated seconds of one evaluation whose `work` was counted (speedlib.counting.Work)."""
    busy = 0.0
    for (flops, size), count in work.kernels.items():
        busy += count * max(flops / (card.flops * ARITHMETIC), size / (card.bandwidth * TRAFFIC), KERNEL)
    return max(busy, work.launches * LAUNCH)


def run_seconds(works: dict, table: list[str], card: Card) -> float:
    """A run by its schedule; `works` holds what an evaluation of each action asks for."""
    return sum(seconds(works[action], card) for action in table)


def estimates(size=(1024, 1024), steps: int = 20) -> list[dict]:
    """Rows for both models: no node, ToMA at three ratios, and the preset `paper`, on each card."""
    import torch
    from comfyui_toma.toma_core.settings import PRESETS, Settings
    from speedlib import counting, methods, models

    rows = []
    for family in ("unet", "flux"):
        if family == "unet":
            model = models.unet(dtype=torch.float16, device="meta")
        else:
            model = models.flux(19, 38, dtype=torch.bfloat16, device="meta")
        batch = BATCH[family]
        none = counting.evaluations(model, family, size, batch=batch)["leave"]
        rows.append(_row(family, size, "none", None, {"leave": none}, ["leave"] * steps, none))
        if family == "unet":
            tomesd = counting.of_method(model, family, size, methods.tomesd(0.5), batch)
            rows.append(_row(family, size, "tomesd", 0.5, {"leave": tomesd}, ["leave"] * steps, none))
        kept = {"carry_detail": False, "reselect_every": 10, "reweight_every": 5}
        wanted = [("toma", Settings(ratio=ratio, **kept)) for ratio in (0.25, 0.5, 0.75)]
        wanted += [(f"preset {name}", PRESETS[name][family]) for name in ("paper", "balanced", "fast")]
        for name, settings in wanted:
            table = [action.value for action in settings.schedule.table(steps)]
            actions = tuple({"reselect", *table} - {"leave"})
            works = {"leave": none, **counting.evaluations(model, family, size, settings, actions, batch)}
            rows.append(_row(family, size, name, settings.ratio, works, table, none))
    return rows


def _row(family: str, size, method: str, ratio: float | None, works: dict, table: list[str], none) -> dict:
    last = works.get("reuse", works[table[-1]])
    cards = {}
    for card in CARDS:
        taken, full = run_seconds(works, table, card), len(table) * seconds(none, card)
        cards[card.name] = {"seconds_per_step": taken / len(table), "speedup": full / taken, "estimate": True}
    row = {
        "model": {"unet": "SDXL", "flux": "Flux"}[family],
        "size": f"{size[0]}x{size[1]}",
        "method": method,
    }
    row |= {
        "ratio": ratio,
        "launches": last.launches,
        "launches_choosing": works.get("reselect", last).launches,
    }
    row |= {"bytes": last.moved, "flops": last.flops, "peak_bytes": last.peak, "estimates": cards}
    if method == "preset paper":
        row["published"] = PUBLISHED[family]
    return row


def table(rows: list[dict]) -> str:
    head = f"{'model':6}{'method':17}{'ratio':>6}{'launches':>10}{'choosing':>10}"
    head += f"{'GB moved':>10}{'TFLOPs':>8}{'peak MB':>9}"
    lines = [head + "".join(f"{card.name:>18}" for card in CARDS)]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
        line = f"{row['model']:6}{row['method']:17}{ratio:>6}{row['launches']:>10}{row['launches_choosing']:>10}"
        line += f"{row['bytes'] / 1e9:>10.1f}{row['flops'] / 1e12:>8.2f}{row['peak_bytes'] / 2**20:>9.0f}"
        for found in row["estimates"].values():
            line += f"{found['seconds_per_step'] * 1e3:>9.1f} ms{found['speedup']:>5.2f}x"
        lines.append(line)
        if "published" in row:
            change = ", ".join(f"{name} {1 / e['speedup'] - 1:+.0%}" for name, e in row["estimates"].items())
            lines.append(f"{'':6}published {row['published']:+.0%}; estimated {change}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1024x1024")
    options = parser.parse_args()
    from comfy_here import import_comfyui

    import_comfyui(Path(tempfile.mkdtemp()))
    width, height = map(int, options.size.split("x"))
    print("ESTIMATES. One picture (SDXL: with a negative prompt), half precision, a run of 20 steps,")
    print("counted on meta tensors. Launches and bytes are those of a merged step.")
    print(table(estimates((width, height))))


if __name__ == "__main__":
    main()
