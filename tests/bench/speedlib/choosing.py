"""What selection and weights cost by themselves, by tile: at tile 0 the image is one tile."""

from __future__ import annotations

from statistics import median

import torch

from .watch import CLOCKS

GRIDS = {"SDXL": ((64, 640), (32, 1280)), "Flux": ((64, 3072), (64, 3072))}  # one set each, at 1024 px


def measure(tiles: tuple[int, ...], steps: dict[str, float], ratio: float = 0.5, rounds: int = 3, clock: str = "wall"):
    """Rows; `steps` are the seconds of an unmerged step of each model. Random tokens: the time is the same."""
    from comfyui_toma.toma_core.merge import weigh
    from comfyui_toma.toma_core.selection import keep_count, select, similarity
    from comfyui_toma.toma_core.tiles import Tiles

    now, rows = CLOCKS[clock], []
    for model, step in steps.items():
        for tile in tiles:
            total = {"select": 0.0, "weigh": 0.0}
            for side, channels in dict.fromkeys(GRIDS[model]):
                layout = Tiles.of(side, side, tile)
                features = layout.split(torch.randn(1, side * side, channels))
                keep = keep_count(layout.tokens, ratio)
                taken = []
                for _ in range(rounds if tile else 1):
                    start = now()
                    similar = similarity(features, layout)
                    destinations = select(features, keep, layout, similar=similar)
                    middle = now()
                    weigh(features, destinations, layout, similar=similar)
                    taken.append((middle - start, now() - middle))
                times = GRIDS[model].count((side, channels))
                total["select"] += times * median(t[0] for t in taken)
                total["weigh"] += times * median(t[1] for t in taken)
            grid = "+".join(str(side) for side, _ in GRIDS[model])
            share = 100 * sum(total.values()) / step
            rows.append({"model": model, "grid": grid, "tile": tile, "ratio": ratio, **total, "share": share})
    return rows
