"""Facility location: which tokens stay. They are called destinations.

In each tile the set D of destinations shall maximise f(D) = sum_i max_{j in D} s_ij, where s_ij is the
cosine similarity of tokens i and j: every token shall find a destination that resembles it. f is monotone
and submodular, so taking the token with the largest gain again and again reaches at least 1 - 1/e of the
best value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .tiles import Tiles

SELF = 2.0  # the similarity of a token to itself, see `similarity`
RESTED = 4.0  # added to it for tokens that were not picked last time, so that they are preferred
CHANNELS = 512  # of half-precision features held in fp32 at a time
HALVED = 64  # picks from which it pays to drop the settled tokens half-way
LARGE = 2048  # tokens of a tile from which it pays to look only at what a pick has changed
AFRESH = 128  # picks after which the gains of a large tile are added up anew, before rounding gathers


@dataclass(frozen=True)
class Destinations:
    """The kept tokens of each image: B images, T tiles, s slots a tile, K rows in all.

    Where each tile fills its slots, row k is slot k, and `used`, `rows` and `slots` are None.
    """

    index: Tensor  # [B, T, s] token of the tile in each slot
    keep: int  # K
    used: Tensor | None = None  # bool [B, T, s]
    rows: Tensor | None = None  # [B, K] slot (of T * s) of each row
    slots: Tensor | None = None  # [B, T, s] row of each slot; of an unused slot, a row of its tile

    def images(self, first: int, last: int) -> Destinations:
        """The destinations of images first to last - 1 of the batch."""
        return _rebatched([self], lambda tensors: tensors[0][first:last])

    @staticmethod
    def cat(parts: Sequence[Destinations]) -> Destinations:
        """One batch of several, which have the same tiles and number of rows."""
        return _rebatched(parts, torch.cat)


def _rebatched(parts: Sequence[Destinations], how: Callable[[list[Tensor]], Tensor]) -> Destinations:
    tensors = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Destinations)}
    made: dict[str, Any] = {k: how(v) for k, v in tensors.items() if isinstance(v[0], Tensor)}
    return replace(parts[0], **made)


def keep_count(tokens: int, ratio: float) -> int:
    """How many of the tokens of an image stay when the share `ratio` is merged away."""
    return max(1, round((1 - ratio) * tokens))


def similarity(features: Tensor, tiles: Tiles) -> Tensor:
    """Cosine similarities inside each tile, fp32: [B, T, n, C] -> [B, T, n, n].

    The diagonal is 2: a token that is not picked yet gains 1 more by picking itself, so that none is picked twice and a
    destination always represents itself. Zero tokens count as equal to one another. Padding resembles nothing (-4), and
    nothing is gained by resembling it.
    """
    b, t, n, c = features.shape
    x = features.reshape(b * t, n, c)
    if x.dtype == torch.float32:
        gram = torch.bmm(x, x.mT)
    else:
        gram = x.new_zeros((b * t, n, n), dtype=torch.float32)
        for chunk in x.split(CHANNELS, dim=-1):
            chunk = chunk.float()
            gram.baddbmm_(chunk, chunk.mT)
    gram += 1e-20
    scale = gram.diagonal(dim1=1, dim2=2).rsqrt()
    gram *= scale.unsqueeze(1)
    gram *= scale.unsqueeze(2)
    gram.nan_to_num_(0.0, 0.0, 0.0)  # a token that overflowed in the model must not become an index out of bounds
    gram.diagonal(dim1=1, dim2=2).fill_(SELF)
    gram = gram.unflatten(0, (b, t))
    real = tiles.real_on(features.device)
    if real is not None:
        gram = gram.masked_fill_(~real.unsqueeze(1), 0.0).masked_fill_(~real.unsqueeze(2), -4.0)
    return gram


def select(
    features: Tensor,
    keep: int,
    tiles: Tiles,
    budget: str = "equal",
    similar: Tensor | None = None,
    last: Destinations | None = None,
) -> Destinations:
    """Pick `keep` destinations of each image, at least one a tile, by features [B, T, n, C].

    budget "equal" gives each tile the same number; "adaptive" keeps the largest gains over all tiles of
    the image, which is exact greedy for the image up to twice the equal share in any tile.
    `similar` is `similarity(features, tiles)` if there is one already. The destinations of `last` rest:
    they are picked again only where they gain far more than others do, or where no others are left.
    """
    keep = min(max(keep, tiles.count), tiles.tokens)
    similar = similarity(features, tiles) if similar is None else similar.clone()
    if last is not None:
        similar.diagonal(dim1=2, dim2=3).add_(_rested(last, tiles) * RESTED)
    if budget == "adaptive" and tiles.count > 1:
        slots = min(tiles.size, 2 * -(-keep // tiles.count))
        index, gains = greedy(similar, slots)
        return _packed(index, largest(gains, keep), keep)
    if budget not in ("equal", "adaptive"):
        raise ValueError(f"unknown budget {budget!r}")
    shares = _shares(tiles, keep)
    index, _ = greedy(similar, max(shares))
    if min(shares) == max(shares):
        return Destinations(index, keep)
    used = _first(shares, similar.device).expand(len(index), -1, -1)
    return _packed(index, used, keep)


def _rested(last: Destinations, tiles: Tiles) -> Tensor:
    """The tokens that were not among these destinations: bool [B, T, n]. Padding never rested."""
    picked = last.index.unsqueeze(-1) == torch.arange(tiles.size, device=last.index.device)  # [B, T, s, n]
    if last.used is not None:
        picked = picked & last.used.unsqueeze(-1)
    rested = ~picked.any(2)
    real = tiles.real_on(last.index.device)
    return rested if real is None else rested & real


def greedy(similar: Tensor, picks: int) -> tuple[Tensor, Tensor]:
    """The greedy order of each tile: similar [B, T, n, n] -> tokens [B, T, picks], gains [B, T, picks].

    Overwrites `similar`.
    """
    best = similar.flatten(0, 1)
    if best.shape[1] >= LARGE:
        tokens, values = map(torch.stack, zip(*(_pick_by_change(tile, picks) for tile in best), strict=True))
    else:
        tokens, values = _pick_in_halves(best, picks)
    gains = values.diff(dim=-1, prepend=torch.zeros_like(values[:, :1]))
    return tokens.unflatten(0, similar.shape[:2]), gains.unflatten(0, similar.shape[:2])


def _pick_in_halves(best: Tensor, picks: int) -> tuple[Tensor, Tensor]:
    """`_pick`; of many picks the second half goes without the tokens that the first has settled."""
    if picks < HALVED:
        return _pick(best, picks)
    half = picks // 2
    tokens, values = _pick(best, half)
    best, rest, settled = _settle(best, tokens[:, -1:], best.shape[1] - half)
    more, more_values = _pick(best, picks - half)
    return torch.cat((tokens, rest.gather(1, more)), -1), torch.cat((values, more_values + settled), -1)


def _pick(best: Tensor, picks: int) -> tuple[Tensor, Tensor]:
    """The tokens picked and f after each, both [BT, picks].

    best [BT, j, i] is how similar token i is to its destination if j became one: max(s_ij, m_i). Its sum over
    i is largest where the gain is, and its row j is the next m. It is kept up in place; the relu differences
    of the formula are never written out.
    """
    tokens: list[Tensor] = []
    values: list[Tensor] = []
    for _ in range(picks):
        if tokens:
            best.clamp_(min=_row(best, tokens[-1]))
        value, token = best.sum(-1).max(-1, keepdim=True)
        tokens.append(token)
        values.append(value)
    return torch.cat(tokens, -1), torch.cat(values, -1)


def _pick_by_change(best: Tensor, picks: int) -> tuple[Tensor, Tensor]:
    """`_pick` of one large tile, [n, n] -> [picks] both, that adds up anew only the tokens that have found a
    better destination. The p-th pick improves about n / p of them, so all picks cost n^2 log n, not n^3. How
    many they are the host has to know: this one waits for the device at each pick.
    """
    tokens, values = [], []
    # the m of `_pick`; `best` is kept up with it only where all is added up
    reached = best.new_full((best.shape[1],), -torch.inf)
    for pick in range(picks):
        if pick % AFRESH == 0:
            total = best.clamp_(min=reached).sum(-1)
        value, token = total.max(-1, keepdim=True)
        tokens.append(token)
        values.append(value)
        before, reached = reached, torch.maximum(reached, best.index_select(0, token).squeeze(0))
        better = (reached > before).nonzero().squeeze(1)
        columns = best.index_select(1, better).clamp_(min=before[better])  # [n, those]
        total -= columns.sum(-1)
        total += columns.clamp_(min=reached[better]).sum(-1)
    return torch.cat(tokens), torch.cat(values)


def _row(best: Tensor, token: Tensor) -> Tensor:
    """best [BT, n, n], token [BT, 1] -> [BT, 1, n]"""
    return best.gather(1, token.unsqueeze(-1).expand(-1, -1, best.shape[-1]))


def _settle(best: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """After the pick `last` [BT, 1], what is picked is settled: best of the `count` other tokens alone,
    [BT, count, count], which they are, [BT, count], and the share of the settled ones in f, [BT, 1]."""
    so_far = _row(best, last)
    best.clamp_(min=so_far)
    free = so_far.squeeze(1) < SELF
    rest = _positions(free.cumsum(-1), count)
    rows = best.flatten(0, 1).index_select(0, through_batch(rest, best.shape[1])).unflatten(0, rest.shape)
    settled = so_far.squeeze(1).masked_fill(free, 0.0).sum(-1, keepdim=True)
    return rows.gather(2, rest.unsqueeze(1).expand(-1, count, -1)), rest, settled


def through_batch(index: Tensor, each: int) -> Tensor:
    """An index [B, k] into `each` things an image, as one [B * k] into those of all images."""
    return (index + torch.arange(0, len(index) * each, each, device=index.device).unsqueeze(1)).flatten()


def _positions(counted: Tensor, count: int) -> Tensor:
    """Where a running count [B, m] reaches 1, 2, ... count: [B, count]"""
    wanted = torch.arange(1, count + 1, device=counted.device).expand(len(counted), -1)
    return torch.searchsorted(counted, wanted.contiguous())


def largest(gains: Tensor, keep: int) -> Tensor:
    """Which `keep` gains of each image to take: the first of each tile, then the largest. [B, T, s] -> bool.

    A radix search for the last gain that is taken, in place of a sort: non-negative floats are ordered as
    their bits are. Of gains that equal it, the foremost are taken.
    """
    b, t, s = gains.shape
    first = torch.arange(s, device=gains.device) == 0
    bits = gains.clamp_min(0.0).masked_fill(first, torch.inf).flatten(1).view(torch.int32)  # [B, Ts]
    digits = torch.arange(256, device=gains.device, dtype=torch.int32)
    bound = bits.new_zeros((b, 1))
    for place in (24, 16, 8, 0):
        tries = bound + (digits[: 128 if place == 24 else 256] << place)  # [B, 256]
        enough = (bits.unsqueeze(1) >= tries.unsqueeze(2)).sum(-1) >= keep
        bound = bound + ((enough.sum(-1, keepdim=True) - 1) << place).int()
    above, equal = bits > bound, bits == bound
    missing = keep - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))).view(b, t, s)


def _packed(index: Tensor, used: Tensor, keep: int) -> Destinations:
    filled = used.flatten(1).cumsum(-1)  # [B, Ts]
    return Destinations(index, keep, used, _positions(filled, keep), (filled - 1).view_as(used))


@torch.compiler.assume_constant_result
@lru_cache(maxsize=128)
def _shares(tiles: Tiles, keep: int) -> tuple[int, ...]:
    """Destinations of each tile: one, and the rest spread evenly over what the tiles hold beyond one."""
    count, tokens = tiles.count, tiles.tokens
    if keep % count == 0:
        return (keep // count,) * count
    ends = [t + (t * tokens // count - t) * (keep - count) // (tokens - count) for t in range(count + 1)]
    return tuple(b - a for a, b in pairwise(ends))


@torch.compiler.assume_constant_result
@lru_cache(maxsize=128)
def _first(shares: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(max(shares), device=device) < torch.tensor(shares, device=device)[:, None]
