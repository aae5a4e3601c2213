"""The weights, and merge and unmerge as two matrix products.

A = softmax over the destinations of t * s, one column a token; M = A with rows divided by their sums;
merged = M x; unmerged = A^T y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .selection import Destinations, select, similarity, through_batch
from .tiles import Tiles

# (features [B, T, n, C], number to keep, tiles, temperature, budget, destinations that rest) -> Merge: `reselect` or a
# rival of it
Select = Callable[..., "Merge"]
TEMPERATURE = 1000.0  # the published one: nearly all of a token goes to its most similar destination


@dataclass(frozen=True)
class Merge:
    """From the N tokens of each image to K rows and back, in the model's dtype.

    B images, T tiles of n tokens, s slots a tile. Where every token stays there are no weights. With hard
    weights U only copies rows, so `source` stands in for `up`.
    """

    tiles: Tiles
    destinations: Destinations
    kept: Tensor  # [B, K] token of the grid that each row stands for
    down: Tensor | None = None  # M [B, T, s, n]
    up: Tensor | None = None  # A [B, T, s, n]
    source: Tensor | None = None  # [B, N] row of each token
    # The same indices, running through the batch
    _kept: Tensor = field(init=False, repr=False, compare=False)
    _rows: Tensor | None = field(init=False, repr=False, compare=False)
    _slots: Tensor | None = field(init=False, repr=False, compare=False)
    _source: Tensor | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows, slots, source = self.destinations.rows, self.destinations.slots, self.source
        keep, (_, t, s) = self.destinations.keep, self.destinations.index.shape
        object.__setattr__(self, "_kept", through_batch(self.kept, self.tiles.tokens))
        object.__setattr__(self, "_rows", None if rows is None else through_batch(rows, t * s))
        object.__setattr__(self, "_slots", None if slots is None else through_batch(slots.flatten(1), keep))
        object.__setattr__(self, "_source", None if source is None else through_batch(source, keep))

    def merge(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, K, C]"""
        if self.down is None:
            return x
        merged = self.down @ self.tiles.split(x)
        if self._rows is None:
            return merged.flatten(1, 2)
        return merged.flatten(0, 2).index_select(0, self._rows).unflatten(0, self.kept.shape)

    def take(self, x: Tensor) -> Tensor:
        """The destinations' own rows instead of means: [B, N, C] -> [B, K, C]"""
        if self.down is None:
            return x
        return rows_of(x, self.kept, self._kept)

    def copied(self, y: Tensor) -> Tensor:
        """Each token as the row that most of it went to, which `take` undoes: [B, K, C] -> [B, N, C]"""
        return rows_of(y, self.assignment, self._copies)

    def unmerge(self, y: Tensor) -> Tensor:
        """[B, K, C] -> [B, N, C]"""
        if self.down is None:
            return y
        if self.up is None:
            assert self.source is not None and self._source is not None
            return y.flatten(0, 1).index_select(0, self._source).unflatten(0, self.source.shape)
        return self.tiles.join(self._spread(y))

    def residual(self, x: Tensor, delta: Tensor) -> Tensor:
        """x [B, N, C] + unmerge(delta [B, K, C])"""
        if self.up is None:
            return x + self.unmerge(delta)
        return self.tiles.add(x, self._spread(delta))

    def _spread(self, y: Tensor) -> Tensor:
        """A^T y: [B, K, C] -> [B, T, n, C]"""
        if self._slots is not None:
            y = y.flatten(0, 1).index_select(0, self._slots)
        assert self.up is not None
        return self.up.mT @ y.reshape(*self.up.shape[:3], -1)

    @cached_property
    def assignment(self) -> Tensor:
        """The row that most of each token went to, [B, N]."""
        if self.down is None:
            return self.kept
        if self.source is not None:
            return self.source
        assert self.up is not None
        return _nearest(self.up, self.destinations, self.tiles)

    @cached_property
    def _copies(self) -> Tensor:
        return through_batch(self.assignment, self.destinations.keep)

    def images(self, first: int, last: int) -> Merge:
        """The merge of images first to last - 1 of the batch."""
        return self._rebatched(self.destinations.images(first, last), lambda part: part(self)[first:last])

    @staticmethod
    def cat(merges: Sequence[Merge]) -> Merge:
        """One batch of several, which have the same tiles and number of rows."""
        destinations = Destinations.cat([m.destinations for m in merges])
        return merges[0]._rebatched(destinations, lambda part: torch.cat([part(m) for m in merges]))

    def _rebatched(self, destinations: Destinations, of: Callable[[Callable[[Merge], Tensor]], Tensor]) -> Merge:
        parts = [attrgetter(name) for name in ("kept", "down", "up", "source")]
        made: list[Any] = [None if part(self) is None else of(part) for part in parts]
        return Merge(self.tiles, destinations, *made)


def rows_of(x: Tensor, rows: Tensor, flat: Tensor) -> Tensor:
    """The tokens `rows` [B, K] of each image: [B, N, C] -> [B, K, C]. `flat` is through_batch(rows, N)."""
    if len(x) > 1 and not x.is_contiguous():  # flattened, all of x would be copied
        return torch.stack([one.index_select(0, index) for one, index in zip(x, rows)])
    return x.flatten(0, 1).index_select(0, flat).unflatten(0, rows.shape)


def reselect(
    features: Tensor,
    keep: int,
    tiles: Tiles,
    temperature: float | None = TEMPERATURE,
    budget: str = "equal",
    last: Destinations | None = None,
) -> Merge:
    """Pick destinations by features [B, T, n, C], others than `last` where it can be, and weigh the tokens by them."""
    similar = similarity(features, tiles)
    destinations = select(features, keep, tiles, budget, similar, last)
    return weigh(features, destinations, tiles, temperature, similar)


def weigh(
    features: Tensor,
    destinations: Destinations,
    tiles: Tiles,
    temperature: float | None = TEMPERATURE,
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
        return Merge(tiles, destinations, kept)

    similar = similarity(features, tiles) if similar is None else similar
    logits = similar.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, n))  # [B, T, s, n]
    if destinations.used is not None:
        logits = logits.masked_fill(~destinations.used.unsqueeze(-1), -inf)
    hard = temperature is None or temperature == inf
    if temperature is None or hard:  # hard alone tells a type checker nothing of the temperature
        slot = torch.arange(index.shape[-1], device=device).unsqueeze(1)
        up = (logits.argmax(2, keepdim=True) == slot).float()
    else:
        up = (logits * temperature).softmax(2)
    real = tiles.real_on(device)
    if real is not None:
        up = up * real.unsqueeze(1)
    down = (up / up.sum(-1, keepdim=True).clamp_min(1e-6)).to(features.dtype)  # an unused slot has no tokens

    places = (index + torch.arange(0, t * n, n, device=device).unsqueeze(-1)).flatten(1)  # [B, Ts]
    if destinations.rows is not None:
        places = places.gather(1, destinations.rows)
    kept = tiles.order(device).take(places)
    if hard:
        return Merge(tiles, destinations, kept, down, source=_nearest(up, destinations, tiles))
    return Merge(tiles, destinations, kept, down, up.to(features.dtype))


def _nearest(up: Tensor, destinations: Destinations, tiles: Tiles) -> Tensor:
    """The row with the largest weight of each token, [B, N]."""
    _, t, s, _ = up.shape
    slot = up.argmax(2)  # [B, T, n]
    if destinations.slots is None:
        row = slot + torch.arange(0, t * s, s, device=up.device).unsqueeze(1)
    else:
        row = destinations.slots.gather(2, slot)
    return tiles.join(row.unsqueeze(-1)).squeeze(-1)


def finite(x: Tensor) -> Tensor:
    """x; in fp16 infinities become the largest number, as in ComfyUI's Flux blocks, because inf - inf is no number."""
    if x.dtype is not torch.float16:
        return x
    most = torch.finfo(x.dtype).max
    return x.clamp_(-most, most)
