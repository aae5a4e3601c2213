"""tomesd's bipartite matching in the place of our selection (`patch(select=...)`)."""

from __future__ import annotations

import torch
from comfyui_toma.toma_core.merge import TEMPERATURE, Merge
from comfyui_toma.toma_core.selection import Destinations
from comfyui_toma.toma_core.tiles import Tiles
from einops import rearrange
from torch import Tensor

SEED = 0


def tomesd(
    features: Tensor,
    keep: int,
    tiles: Tiles,
    temperature: float | None = TEMPERATURE,
    budget: str = "equal",
    last: Destinations | None = None,
) -> Merge:
    """The PyPI package's own matching over the whole image: a destination at random in each 2x2, the tokens most alike
    to one merged into it. At most three quarters of the tokens can go."""
    from tomesd.merge import bipartite_soft_matching_random2d

    x = tiles.join(features)
    chance, again = (torch.Generator().manual_seed(SEED) for _ in range(2))
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
    rows = kept.shape[1]
    assignment = unmerge(torch.arange(rows).float()[None, :, None].expand(len(x), -1, 1)).squeeze(-1).long()
    up = (assignment[:, None, None] == torch.arange(rows)[:, None]).to(features.dtype)  # [B, 1, K, N]
    sizes = up.sum(-1, keepdim=True)
    whole = Tiles.of(tiles.height, tiles.width, 0)
    return Merge(whole, Destinations(kept[:, None], rows), kept, up / sizes, source=assignment)
