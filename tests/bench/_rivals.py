"""What else one could do, for the fidelity benchmark: other ways to pick and merge, placed where ours are.

Each rival takes the place of select and weigh in our own blocks; what it is compared under (how often, carrying or
not) are the settings of its point. Keys-and-values merging and the cache come as patches of their own.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from comfyui_toma.toma_core.merge import TEMPERATURE, Merge, weigh
from comfyui_toma.toma_core.patcher import call as patched_call
from comfyui_toma.toma_core.patcher.call import Call
from comfyui_toma.toma_core.patcher.detail import Detail
from comfyui_toma.toma_core.selection import Destinations, select
from comfyui_toma.toma_core.tiles import Tiles
from einops import rearrange
from torch import Tensor


@contextmanager
def chosen_by(choose):
    """While active, blocks merge by choose(features [B, T, n, C], keep, tiles, temperature) instead of facility
    location."""
    ours = patched_call.reselect

    def theirs(features, keep, tiles, temperature=TEMPERATURE, budget="equal", last=None):
        return choose(features, keep, tiles, temperature)

    patched_call.reselect = theirs
    try:
        yield
    finally:
        patched_call.reselect = ours


@contextmanager
def nothing_computed(drift: bool):
    """While active, merged steps add what a full step has added, and nothing of their own: what a cache of blocks
    does. With `drift` that goes on as it changed from one full step to the next, as the better caches do."""
    counted, expected = Call._counted, Detail.expected

    def nothing(self, place, detail, change, wanted):
        spread = None if place.first else self.spread.get(place.span)
        out = counted(self, place, detail, change, wanted)
        if wanted is None:
            return out
        return torch.zeros_like(out) if spread is None else -spread

    Call._counted = nothing
    Detail.expected = expected if drift else lambda self, at: self.added
    try:
        yield
    finally:
        Call._counted, Detail.expected = counted, expected


def random_picks(features: Tensor, keep: int, tiles: Tiles, temperature: float) -> Merge:
    shares = select(features, keep, tiles)  # as many in each tile as ours
    index = torch.rand(features.shape[:3]).argsort(-1)[..., : shares.index.shape[-1]]
    return weigh(features, replace(shares, index=index), tiles, temperature)


def regular_picks(features: Tensor, keep: int, tiles: Tiles, temperature: float) -> Merge:
    """Every n-th token along a checkered walk of the tile."""
    shares, n = select(features, keep, tiles), features.shape[2]
    side = round(n**0.5)
    walk = torch.arange(n).view(side, side)
    walk = torch.stack([row.roll(i % 2) for i, row in enumerate(walk)]).flatten()
    index = walk[torch.linspace(0, n - 1, shares.index.shape[-1]).round().long()]
    index = index.expand_as(shares.index).contiguous()
    return weigh(features, replace(shares, index=index), tiles, temperature)


def pooling(features: Tensor, keep: int, tiles: Tiles, temperature: float) -> Merge:
    """Means of 2x2 (or 2x1) tokens that lie side by side."""
    whole = Tiles.of(tiles.height, tiles.width, 2)
    split = whole.split(tiles.join(features))
    b, t, n, _ = split.shape
    per_tile = max(1, round(keep / t))
    index = torch.arange(0, n, n // per_tile)[:per_tile].expand(b, t, -1).contiguous()
    near = torch.zeros(b, t, n, per_tile)  # each token belongs to the pick before it
    near[..., torch.arange(n), torch.arange(n) // (n // per_tile)] = 1
    return weigh(near, Destinations(index, per_tile * t), whole)


@dataclass(frozen=True)
class Matched:
    """tomesd's matching in the form of a Merge."""

    kept: Tensor
    down: object
    up: object

    def merge(self, x: Tensor) -> Tensor:
        return self.down(x)

    def unmerge(self, y: Tensor) -> Tensor:
        return self.up(y)

    def residual(self, x: Tensor, change: Tensor) -> Tensor:
        return x + self.up(change)


def tomesd_matching(features: Tensor, keep: int, tiles: Tiles, temperature: float) -> Matched:
    """The PyPI package's own bipartite matching, over the whole image, a destination at random in each 2x2."""
    from tomesd.merge import bipartite_soft_matching_random2d

    x, seed = tiles.join(features), int(torch.randint(2**31, ()))
    chance, again = (torch.Generator().manual_seed(seed) for _ in range(2))
    merge, unmerge = bipartite_soft_matching_random2d(
        x, tiles.width, tiles.height, 2, 2, tiles.tokens - keep, generator=chance
    )
    # Which of each four became the destination, as the package has drawn it.
    corner = torch.randint(4, (tiles.height // 2, tiles.width // 2, 1), generator=again)
    destination = rearrange(corner == torch.arange(4), "h w (y x) -> (h y w x)", y=2)
    own = torch.arange(tiles.tokens).float()[None, :, None].expand(len(x), -1, 1)
    alone = merge(own, mode="amax")  # right for tokens that stay unmerged, which come first
    held = merge(own.masked_fill(~destination[None, :, None], -1), mode="amax")  # right for destinations
    kept = torch.where(held >= 0, held, alone).squeeze(-1).long()
    return Matched(kept, merge, unmerge)


def keys_and_values(model, ratio: float):
    """Only keys and values are merged: the queries keep all tokens."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.selection import keep_count

    model = model.clone()

    def shorter(x: Tensor, grid: tuple[int, int], features: Tensor) -> Tensor:
        tiles = Tiles.of(*grid, 8)
        return reselect(tiles.split(features), keep_count(tiles.tokens, ratio), tiles).merge(x)

    def unet(n, context, value, extra_options):
        grid = tuple(extra_options["activations_shape"][2:])
        kept = shorter(n, grid, n)
        return n, kept, kept

    def flux(q, k, v, pe, attn_mask, extra_options):
        from comfy.ldm.flux.math import apply_rope

        start = extra_options["img_slice"][0]
        side = round((k.shape[2] - start) ** 0.5)
        q, k = apply_rope(q, k, pe)
        flat = [rearrange(x[:, :, start:], "b h n d -> b n (h d)") for x in (k, v)]
        both = shorter(torch.cat(flat, -1), (side, side), flat[0]).chunk(2, -1)
        tokens = [rearrange(x, "b n (h d) -> b h n d", h=k.shape[1]) for x in both]
        return {
            "q": q,
            "k": torch.cat((k[:, :, :start], tokens[0]), 2),
            "v": torch.cat((v[:, :, :start], tokens[1]), 2),
            "pe": None,
        }

    is_flux = hasattr(model.model.diffusion_model, "double_blocks")
    model.set_model_attn1_patch(flux if is_flux else unet)
    return model


def easycache(model, threshold: float):
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, threshold, 0.15, 0.95, False).args[0]
