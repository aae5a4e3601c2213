"""The weights, and merge and unmerge as two matrix products.

A = softmax over the destinations of t * s, one column a token; M = A with rows divided by their sums;
merged = M x; unmerged = A^T y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from .selection import Destinations, select, similarity
from .tiles import Tiles


@dataclass(frozen=True)
class Merge:
    """From the N tokens of each image to K rows and back, in the model's dtype.

    B images, T tiles of n tokens, s slots a tile. Where every token stays there are no weights.
    """

    tiles: Tiles
    destinations: Destinations
    kept: Tensor  # [B, K] token of the grid that each row stands for
    sizes: Tensor  # [B, K] how many tokens each row stands for, fp32
    down: Tensor | None = None  # M [B, T, s, n]
    up: Tensor | None = None  # A [B, T, s, n]
    rows: Tensor | None = None  # [B * K] slot of each row, where slots and rows differ
    slots: Tensor | None = None  # [B * T * s] row of each slot

    def merge(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, K, C]"""
        if self.down is None:
            return x
        merged = self.down @ self.tiles.split(x)
        if self.rows is None:
            return merged.flatten(1, 2)
        return merged.flatten(0, 2).index_select(0, self.rows).unflatten(0, self.kept.shape)

    def unmerge(self, y: Tensor) -> Tensor:
        """[B, K, C] -> [B, N, C]"""
        if self.up is None:
            return y
        if self.slots is not None:
            y = y.flatten(0, 1).index_select(0, self.slots)
        return self.tiles.join(self.up.mT @ y.reshape(*self.up.shape[:3], -1))

    def residual(self, x: Tensor, delta: Tensor) -> Tensor:
        """x [B, N, C] + unmerge(delta [B, K, C])"""
        return x + self.unmerge(delta)

    def assignment(self) -> Tensor:
        """The row that most of each token went to, [B, N]."""
        if self.up is None:
            return self.kept
        nearest = self.up.argmax(2)  # [B, T, n]
        if self.destinations.slots is None:
            _, t, s, _ = self.up.shape
            row = nearest + torch.arange(0, t * s, s, device=nearest.device).unsqueeze(1)
        else:
            row = self.destinations.slots.gather(2, nearest)
        return self.tiles.join(row.unsqueeze(-1)).squeeze(-1)

    def images(self, first: int, last: int) -> Merge:
        """The merge of images first to last - 1 of the batch."""
        weights = (None if x is None else x[first:last] for x in (self.down, self.up))
        return _merge(
            self.tiles,
            self.destinations.images(first, last),
            self.kept[first:last],
            self.sizes[first:last],
            *weights,
        )

    @staticmethod
    def cat(merges: Sequence[Merge]) -> Merge:
        """One batch of several, which have the same tiles and number of rows."""
        destinations = Destinations.cat([m.destinations for m in merges])
        columns = zip(*((m.kept, m.sizes, m.down, m.up) for m in merges), strict=True)
        return _merge(
            merges[0].tiles, destinations, *(None if c[0] is None else torch.cat(c) for c in columns)
        )


def reselect(
    features: Tensor, keep: int, tiles: Tiles, temperature: float | None = 1000.0, budget: str = "equal"
) -> tuple[Destinations, Merge]:
    """Pick destinations by features [B, T, n, C] and weigh the tokens by them."""
    similar = similarity(features, tiles)
    destinations = select(features, keep, tiles, budget, similar)
    return destinations, weigh(features, destinations, tiles, temperature, similar)


def weigh(
    features: Tensor,
    destinations: Destinations,
    tiles: Tiles,
    temperature: float | None = 1000.0,
    similar: Tensor | None = None,
) -> Merge:
    """Spread the tokens over destinations by features [B, T, n, C]; their dtype is that of the weights.

    Without a temperature (None or inf) each token goes to the most similar destination alone.
    `similar` is `similarity(features, tiles)` if there is one already.
    """
    b, t, n, _ = features.shape
    index, device = destinations.index, features.device
    if destinations.keep == tiles.tokens:
        kept = torch.arange(tiles.tokens, device=device).expand(b, -1)
        return Merge(tiles, destinations, kept, torch.ones_like(kept, dtype=torch.float32))

    similar = similarity(features, tiles) if similar is None else similar
    logits = similar.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, n))  # [B, T, s, n]
    if destinations.used is not None:
        logits = logits.masked_fill(~destinations.used.unsqueeze(-1), -inf)
    if temperature is None or temperature == inf:
        slot = torch.arange(index.shape[-1], device=device).unsqueeze(1)
        up = (logits.argmax(2, keepdim=True) == slot).float()
    else:
        up = (logits * temperature).softmax(2)
    real = tiles.real_on(device)
    if real is not None:
        up = up * real.unsqueeze(1)
    sizes = up.sum(-1, keepdim=True)
    down = up / sizes.clamp_min(1e-6)  # an unused slot has no tokens

    places = (index + torch.arange(0, t * n, n, device=device).unsqueeze(-1)).flatten(1)  # [B, Ts]
    sizes = sizes.flatten(1)
    if destinations.rows is not None:
        places, sizes = places.gather(1, destinations.rows), sizes.gather(1, destinations.rows)
    kept = tiles.order(device)[places]
    dtype = features.dtype
    return _merge(tiles, destinations, kept, sizes, down.to(dtype), up.to(dtype))


def _merge(
    tiles: Tiles,
    destinations: Destinations,
    kept: Tensor,
    sizes: Tensor,
    down: Tensor | None,
    up: Tensor | None,
) -> Merge:
    """With rows and slots counted through the whole batch, for one index_select each."""
    if destinations.rows is None or up is None:
        return Merge(tiles, destinations, kept, sizes, down, up)
    rows, slots = destinations.rows, destinations.slots.flatten(1)
    image = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    rows, slots = rows + image * slots.shape[1], slots + image * rows.shape[1]
    return Merge(tiles, destinations, kept, sizes, down, up, rows.flatten(), slots.flatten())
