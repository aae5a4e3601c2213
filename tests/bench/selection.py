"""How fast tokens are picked, against the authors' formulation written from the formula.

Both pick from the same features, one after the other in each round, and must reach the same f. With one
thread (the default) the time is that thread's own, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import comfyui_toma  # noqa: F401
from comfyui_toma.toma_core.selection import select
from comfyui_toma.toma_core.tiles import Tiles

SIDE, CHANNELS = 64, 640  # SDXL at 1024 px
BARS = {8: 1.3, 16: 2.0}


def authors(features: Tensor, picks: int) -> Tensor:
    """features [BT, n, C] -> [BT, picks]: gain_j = sum_i relu(s_ij - m_i), the difference in full."""
    x = torch.nn.functional.normalize(features, dim=-1)
    s = x @ x.mT
    tile = torch.arange(len(x))
    token = s.sum(-1).argmax(-1)
    best, picked = s[tile, token], torch.zeros(s.shape[:2], dtype=torch.bool)
    picked[tile, token] = True
    tokens = [token]
    for _ in range(picks - 1):
        gains = (s - best.unsqueeze(1)).relu().sum(-1).masked_fill(picked, -1.0)
        token = gains.argmax(-1)
        picked[tile, token] = True
        best = torch.maximum(best, s[tile, token])
        tokens.append(token)
    return torch.stack(tokens, -1)


def value(features: Tensor, index: Tensor) -> float:
    """f of all tiles: features [BT, n, C], index [BT, picks]"""
    x = torch.nn.functional.normalize(features.double(), dim=-1)
    return float((x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1])) @ x.mT).amax(1).sum())


def features_of(batch: int, tiles: Tiles) -> Tensor:
    """Like hidden states: smooth over the grid, with noise and a common direction. [B, T, n, C]"""
    small = torch.randn(batch, CHANNELS, SIDE // 4, SIDE // 4)
    smooth = torch.nn.functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear")
    x = smooth.flatten(2).mT + 0.5 * torch.randn(batch, SIDE * SIDE, CHANNELS) + torch.randn(batch, 1, CHANNELS)
    return tiles.split(x).contiguous()


def measure(tile: int, batch: int, ratio: float, rounds: int, clock) -> dict:
    tiles = Tiles.of(SIDE, SIDE, tile)
    features = features_of(batch, tiles)
    flat, picks = features.flatten(0, 1), round(tiles.size * (1 - ratio))
    ways = {
        "authors": lambda: authors(flat, picks),
        "ours": lambda: select(features, picks * tiles.count, tiles).index.flatten(0, 1),
    }
    times = {name: [] for name in ways}
    for index in range(rounds + 1):  # the first round warms up
        for name, way in ways.items():
            start = clock()
            way()
            if index:
                times[name].append(1e3 * (clock() - start))
    ratios = sorted(a / b for a, b in zip(times["authors"], times["ours"], strict=True))
    quarter = len(ratios) // 4
    return {
        "tile": tile,
        "batch": batch,
        "ratio": ratio,
        **{f"{name}_ms": round(statistics.median(t), 2) for name, t in times.items()},
        "speedup": round(statistics.median(ratios), 2),
        "speedup_quartiles": [round(ratios[quarter], 2), round(ratios[-1 - quarter], 2)],
        "f_relative_difference": value(flat, ways["ours"]()) / value(flat, ways["authors"]()) - 1,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench selection", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{SIDE}x{SIDE} tokens, {CHANNELS} channels, fp32, torch {torch.__version__}, {options.threads} thread(s)")
    print("tile  batch  ratio  authors ms   ours ms   speed-up (quartiles)   difference of f")
    results = []
    for tile, batch, ratio in [
        (8, 1, 0.5),
        (8, 2, 0.5),
        (16, 1, 0.5),
        (16, 2, 0.5),
        (8, 2, 0.75),
        (16, 2, 0.75),
    ]:
        r = measure(tile, batch, ratio, options.rounds, clock)
        low, high = r["speedup_quartiles"]
        print(
            f"{tile:4} {batch:6} {ratio:6.2f} {r['authors_ms']:11.1f} {r['ours_ms']:9.1f}"
            f"   {r['speedup']:8.2f} ({low:.2f}-{high:.2f})   {r['f_relative_difference']:15.1e}"
        )
        results.append(r)
    missed = [r for r in results if r["ratio"] == 0.5 and r["speedup"] < BARS[r["tile"]]]
    unequal = [r for r in results if abs(r["f_relative_difference"]) > 1e-4]
    print(f"Bars at ratio 0.5: {BARS[8]}x at tile 8, {BARS[16]}x at tile 16: {'missed' if missed else 'met'}.")
    print(f"f differs by less than 1e-4: {'no' if unequal else 'yes'}.")
    if options.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": options.threads}
        options.json.write_text(json.dumps({**machine, "results": results}, indent=2), encoding="utf-8")
    return 1 if missed or unequal else 0


if __name__ == "__main__":
    sys.exit(main())
