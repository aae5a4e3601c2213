"""FLOPs of one evaluation of the full-size models, by part, and what merging leaves of them. Imports nothing of ours.

    python dev.py bench fullsize

Counted are the products of matrices and the convolutions (2 FLOPs a multiply-add), as torch's FlopCounterMode
does, which test_fullsize.py holds against ComfyUI's own classes. Sizes are (width, height) in pixels of one
image; guidance doubles everything and changes no ratio.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

FULL = (1024, 1024)

# SDXL: stages of 1, 1/2 and 1/4 of the latent's sides
SDXL_CHANNELS = (320, 640, 1280)
SDXL_DEPTH = (0, 2, 10)
SDXL_STAGES = (1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1)  # of the eleven spatial transformers, in running order
SDXL_RES_BLOCKS = 2
SDXL_EMBEDDING, SDXL_POOLED, SDXL_CONTEXT, SDXL_TEXT = 1280, 2816, 2048, 77

FLUX_HIDDEN, FLUX_DOUBLE, FLUX_SINGLE = 3072, 19, 38
FLUX_CONTEXT, FLUX_POOLED, FLUX_TEXT, FLUX_CHANNELS = 4096, 768, 512, 64
FLUX_SKIP = 5  # blocks of each kind that the paper leaves unmerged

Size = tuple[int, int]
Parts = Counter  # part -> FLOPs


def linear(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


def attention(queries: int, keys: int, channels: int) -> int:
    """Both products of an attention, over all heads."""
    return 4 * queries * keys * channels


def keep_count(tokens: int, ratio: float) -> int:
    return max(1, round((1 - ratio) * tokens))


# --------------------------------------------------------------------------- the blocks


def unet_block(tokens: int, channels: int, where: str = "whole block", kept: int | None = None) -> Parts:
    """A BasicTransformerBlock whose `tokens` are merged to `kept`."""
    kept = tokens if kept is None else kept
    rest = tokens if where == "attention only" else kept
    return Counter(
        {
            "self-attention linear": 4 * linear(kept, channels, channels),
            "self-attention products": attention(kept, kept, channels),
            "cross-attention": 2 * linear(rest, channels, channels)
            + 2 * linear(SDXL_TEXT, SDXL_CONTEXT, channels)
            + attention(rest, SDXL_TEXT, channels),
            "feed-forward": linear(rest, channels, 8 * channels) + linear(rest, 4 * channels, channels),
        }
    )


def flux_block(kind: str, tokens: int, where: str = "whole block", kept: int | None = None) -> Parts:
    """A double or single block of `tokens` image tokens, merged to `kept`, and the text."""
    kept = tokens if kept is None else kept
    rest = tokens if where == "attention only" else kept
    modulation = linear(1, FLUX_HIDDEN, (12 if kind == "double" else 3) * FLUX_HIDDEN)
    return Counter(
        {
            "linear": linear(rest + FLUX_TEXT, FLUX_HIDDEN, 12 * FLUX_HIDDEN),
            "attention products": attention(kept + FLUX_TEXT, kept + FLUX_TEXT, FLUX_HIDDEN),
            "modulation": modulation,
        }
    )


def merge_products(tokens: int, kept: int, channels: int, tile: int) -> int:
    """M x, or A^T y: one of the two products of a merged block."""
    return 2 * kept * min(tokens, tile**2 or tokens) * channels


# --------------------------------------------------------------------------- the models


def unet_grids(size: Size) -> list[Size]:
    """(height, width) of the tokens at each stage."""
    height, width = size[1] // 8, size[0] // 8
    grids = [(height, width)]
    for _ in SDXL_CHANNELS[1:]:
        grids.append((ceil(grids[-1][0] / 2), ceil(grids[-1][1] / 2)))
    return grids


def unet_blocks(size: Size) -> list[tuple[int, int]]:
    """(tokens, channels) of each of the 70 transformer blocks, in running order."""
    tokens = [h * w for h, w in unet_grids(size)]
    return [(tokens[s], SDXL_CHANNELS[s]) for s in SDXL_STAGES for _ in range(SDXL_DEPTH[s])]


def flux_tokens(size: Size) -> int:
    return ceil(size[1] / 16) * ceil(size[0] / 16)


def _res_block(tokens: int, inputs: int, outputs: int) -> Parts:
    skip = linear(tokens, inputs, outputs) if inputs != outputs else 0
    convolutions = linear(tokens, 9 * inputs, outputs) + linear(tokens, 9 * outputs, outputs) + skip
    return Counter({"convolutions": convolutions, "embeddings": linear(1, SDXL_EMBEDDING, outputs)})


def _unet_outside(size: Size) -> Parts:
    """All but the transformer blocks: the way down, the middle, the way up with its skip connections."""
    tokens = [h * w for h, w in unet_grids(size)]
    last = len(tokens) - 1
    total = Counter(
        {
            "convolutions": linear(tokens[0], 9 * 4, SDXL_CHANNELS[0]) + linear(tokens[0], 9 * SDXL_CHANNELS[0], 4),
            "embeddings": linear(1, 320, SDXL_EMBEDDING)
            + linear(1, SDXL_POOLED, SDXL_EMBEDDING)
            + 2 * linear(1, SDXL_EMBEDDING, SDXL_EMBEDDING),
        }
    )

    def projections(stage: int) -> Parts:
        each = linear(tokens[stage], SDXL_CHANNELS[stage], SDXL_CHANNELS[stage])
        return Counter({"projections": 2 * each if SDXL_DEPTH[stage] else 0})

    channels, skips = SDXL_CHANNELS[0], [SDXL_CHANNELS[0]]
    for stage, width in enumerate(SDXL_CHANNELS):
        for _ in range(SDXL_RES_BLOCKS):
            total += _res_block(tokens[stage], channels, width) + projections(stage)
            channels = width
            skips.append(channels)
        if stage < last:
            total["convolutions"] += linear(tokens[stage + 1], 9 * channels, channels)
            skips.append(channels)
    total += _res_block(tokens[last], channels, channels) + projections(last)
    total += _res_block(tokens[last], channels, channels)
    for stage in range(last, -1, -1):
        for _ in range(SDXL_RES_BLOCKS + 1):
            total += _res_block(tokens[stage], channels + skips.pop(), SDXL_CHANNELS[stage]) + projections(stage)
            channels = SDXL_CHANNELS[stage]
        if stage:
            total["convolutions"] += linear(tokens[stage - 1], 9 * channels, channels)
    return total


def _flux_outside(size: Size) -> Parts:
    tokens, hidden = flux_tokens(size), FLUX_HIDDEN
    return Counter(
        {
            "inputs and output": linear(tokens, FLUX_CHANNELS, hidden)
            + linear(FLUX_TEXT, FLUX_CONTEXT, hidden)
            + linear(tokens, hidden, FLUX_CHANNELS),
            "embeddings": 2 * (linear(1, 256, hidden) + linear(1, hidden, hidden))
            + linear(1, FLUX_POOLED, hidden)
            + linear(1, hidden, hidden)
            + linear(1, hidden, 2 * hidden),
        }
    )


def parts(
    family: str,
    size: Size = FULL,
    ratio: float = 0.0,
    where: str = "whole block",
    skip: int | None = None,
    tile: int | None = None,
) -> Parts:
    """FLOPs of one evaluation, by part. `ratio` is merged away in all blocks but the first `skip` (of each kind
    in Flux). With a `tile` the products that merge and unmerge are counted too, as part "merging"."""
    layers = 3 if where == "each layer" and family == "unet" else 1
    total = _unet_outside(size) if family == "unet" else _flux_outside(size)
    if family == "unet":
        blocks = [(f"blocks of {c}", n, c, None) for n, c in unet_blocks(size)]
        first = skip or 0
    else:
        n, c = flux_tokens(size), FLUX_HIDDEN
        kinds = (("double", FLUX_DOUBLE), ("single", FLUX_SINGLE))
        blocks = [(f"{kind} blocks", n, c, kind) for kind, depth in kinds for _ in range(depth)]
        first = FLUX_SKIP if skip is None else skip
    index: Counter = Counter()
    for name, tokens, channels, kind in blocks:
        place = index[kind]
        index[kind] += 1
        kept = keep_count(tokens, ratio) if place >= first else tokens
        kept = max(kept, tokens // tile**2) if tile else kept  # at least one a tile
        made = flux_block(kind, tokens, where, kept) if kind else unet_block(tokens, channels, where, kept)
        total.update({f"{name}: {part}": flops for part, flops in made.items()})
        if tile is not None and kept < tokens:
            times = 4 if kind and where == "attention only" else 2 * layers  # Flux: q, k and v, and back
            total["merging"] += times * merge_products(tokens, kept, channels, tile)
    return total


def share(counted: Parts, beginning: str) -> float:
    """Of all FLOPs, the share of the parts whose names begin so."""
    return sum(flops for part, flops in counted.items() if part.startswith(beginning)) / counted.total()


# --------------------------------------------------------------------------- a run


def ideal(family: str, ratio: float, size: Size = FULL, where: str = "whole block", skip: int | None = None) -> float:
    """The speed-up of a merged step if merging were free and FLOPs were time."""
    return parts(family, size).total() / parts(family, size, ratio, where, skip).total()


def skipped_blocks(family: str, settings) -> int:
    """How many first blocks stay unmerged: -1 is the family's own choice."""
    if settings.skip_first_blocks >= 0:
        return settings.skip_first_blocks
    return FLUX_SKIP if family == "flux" and not settings.rides else 0


def merged_total(family: str, settings, size: Size = FULL, merging: bool = True) -> int:
    """FLOPs of one merged evaluation with these settings. Kept tokens that ride are taken without a product and given
    back by one: after each spatial transformer of the UNet, once a network in the few channels of Flux's latent."""
    tile = settings.tile_size if merging and not settings.rides else None
    counted = parts(family, size, settings.ratio, settings.merge.value, skipped_blocks(family, settings), tile)
    if merging and settings.rides:
        counted["merging"] = sum(
            merge_products(n, keep_count(n, settings.ratio), c, settings.tile_size) for n, c in rows(family, size)
        )
    return counted.total()


def rows(family: str, size: Size = FULL) -> list[tuple[int, int]]:
    """(tokens, channels) of each row of blocks that kept tokens ride through, where they are given back."""
    if family == "flux":
        return [(flux_tokens(size), FLUX_CHANNELS)]
    tokens = [h * w for h, w in unet_grids(size)]
    return [(tokens[s], SDXL_CHANNELS[s]) for s in SDXL_STAGES if SDXL_DEPTH[s]]


def merged_share(family: str, settings, size: Size = FULL) -> float:
    """What a merged evaluation costs, in full ones."""
    return merged_total(family, settings, size) / parts(family, size).total()


def main() -> None:
    for family in ("unet", "flux"):
        counted = parts(family)
        print(f"{family}, {FULL[0]}x{FULL[1]}: {counted.total() / 1e12:.2f} TFLOPs")
        for part, flops in counted.items():
            print(f"  {part:40}{flops / 1e12:8.3f}{flops / counted.total():8.1%}")
        for ratio in (0.1, 0.25, 0.5, 0.75, 0.9):
            print(f"  ratio {ratio:g}: at best {ideal(family, ratio):.2f}x")


if __name__ == "__main__":
    main()
