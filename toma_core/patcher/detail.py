"""What a row of blocks adds to its tokens: remembered from full steps, expected at the merged ones between them.

A full step shows what the blocks add to each token. A merged one expects that to go on as it went from one full step
to the next, as far as such a drift proved steady, and believes what its kept tokens tell beyond that as far as such
tales proved right. Full steps judge both, by samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
from torch import Tensor

from ..merge import Merge, rows_of
from ..selection import Destinations
from ..tiles import Tiles
from .memory import raise_unless_out_of_memory

SAMPLES = 256  # about so many kept tokens are remembered to judge by, from two thirds of it to twice as many
CELL = 2  # tokens a side that share one drift, where it is coarse


@dataclass
class Detail:
    """What is kept of one row of blocks. Times are places in the schedule (`schedule.place_of`)."""

    merge: Merge
    added: Tensor | None = None  # [B, N, C] what the blocks added at the full step
    full_at: float | None = None  # when that was; None: not at the same time for all of the batch
    drift: Tensor | None = None  # [B, N, C], if coarse of cells: the change since the full step before
    drift_from: float | None = None  # when that one was
    steady: Tensor | None = None  # [B, 1, 1] how far the drift is expected to go on
    beyond: Tensor | None = None  # [B, R, C] samples of what the last merged step saw beyond the expected
    merged_at: float | None = None  # when that was
    trust: Tensor | None = None  # [B, 1, C] how far such tales are believed

    def expected(self, at: float) -> Tensor:
        """What a full step would add at `at` [B, N, C], if it went on as from one full step to the next; for no
        longer than that took, as samplers may go back and caches may skip."""
        if self.drift is None:
            return self.added
        ahead = min(max((at - self.full_at) / (self.full_at - self.drift_from), 0.0), 1.0)
        drift = self.drift * (ahead * (1.0 if self.steady is None else self.steady))
        return finite(self.added + grown(drift, self.merge.tiles))

    def outline(self, coarse: bool) -> Outline:
        rows, tiles = samples(self.merge.kept), self.merge.tiles
        return Outline(
            tiles,
            self.merge.destinations,
            rows,
            added=_as_drift(self.added, tiles, coarse),
            sampled=rows_of(self.added, rows),
            drift=None if self.drift is None else rows_of(grown(self.drift, tiles), rows),
            **{name: getattr(self, name) for name in _ALIKE},
        )

    def learn(self, before: Outline, coarse: bool) -> None:
        """A full step shows what has become of what was added at the one before: whether it went on as it had begun,
        how much of what merged steps saw beyond that was real, and how it changes now."""
        self.trust, self.steady = before.trust, before.steady
        # Large, and not needed again; should this call give up later, the next has to do without.
        earlier, before.added = before.added, None
        if earlier is None or before.full_at is None or not before.full_at < self.full_at:
            return
        self._judge(before)
        try:
            self.drift = finite(_as_drift(self.added, self.merge.tiles, coarse) - earlier)
            self.drift_from = before.full_at
        except RuntimeError as error:  # one can do without
            raise_unless_out_of_memory(error)

    def _judge(self, before: Outline) -> None:
        took, dtype = self.full_at - before.full_at, self.added.dtype
        reach = took  # how long the drift was followed
        real = rows_of(self.added, before.rows).float() - before.sampled.float()
        # Of a change that grows evenly, what there was of it at the last merged step.
        merged_at = self.full_at if before.merged_at is None else before.merged_at
        share = (merged_at - before.full_at) / took
        if before.drift is not None:
            reach = before.full_at - before.drift_from
            drift = before.drift.float() * (took / reach)
            # The first drift is not judged: it may start from a step that saw noise alone.
            first = before.steady is None
            self.steady = (torch.ones_like(real[:, :1, :1]) if first else steadiness(drift, real)).to(dtype)
            real = real - (drift if first else drift * before.steady)
            # The same of what three full steps bend away from a line.
            share *= (merged_at - before.drift_from) / (self.full_at - before.drift_from)
        # What was seen further off than the drift reaches was counted from another line.
        if before.beyond is not None and 0 < merged_at - before.full_at <= reach and merged_at < self.full_at:
            self.trust = believable(before.beyond, real, share).to(dtype)


@dataclass
class Outline:
    """What of a Detail the next full step learns from; nothing can be merged by it."""

    tiles: Tiles
    destinations: Destinations
    rows: Tensor  # [B, R] the tokens that are samples
    added: Tensor | None  # [B, N, C], if coarse of cells
    sampled: Tensor  # [B, R, C] of what was added
    drift: Tensor | None = None  # [B, R, C] samples
    full_at: float | None = None
    drift_from: float | None = None
    steady: Tensor | None = None
    beyond: Tensor | None = None
    merged_at: float | None = None
    trust: Tensor | None = None


_ALIKE = ("full_at", "drift_from", "steady", "beyond", "merged_at", "trust")
_TIMES = ("full_at", "drift_from", "merged_at")
Remembered = TypeVar("Remembered", Detail, Outline)


@dataclass
class Kept:
    """What a batch of `chunks` equal parts keeps from call to call: of each row of blocks, by merge name, a Detail or,
    if outlined, an Outline."""

    chunks: int
    selected_at: int
    weighed_at: int
    details: dict[str, Detail] | dict[str, Outline] = field(default_factory=dict)
    coarse: bool = False
    outlined: bool = False
    before: Kept | None = None  # in a call that chooses: the outline of what there was before

    @classmethod
    def gather(cls, parts: Sequence[tuple[Kept, int]]) -> Kept:
        """One batch from the chunks (kept, slot) of others. The whole of one batch is that batch itself."""
        whole = parts[0][0]
        if len(parts) == whole.chunks and all(p[0] is whole and p[1] == i for i, p in enumerate(parts)):
            return whole
        names = [name for name in whole.details if all(name in kept.details for kept, _ in parts)]
        return cls(
            len(parts),
            min(kept.selected_at for kept, _ in parts),
            min(kept.weighed_at for kept, _ in parts),
            {name: _gather([(k.details[name], k.chunks, slot) for k, slot in parts]) for name in names},
            whole.coarse,
            whole.outlined,
        )

    def outline(self) -> Kept:
        """What of this the next full step learns from."""
        carried = {name: detail for name, detail in self.details.items() if detail.added is not None}
        outlines = {name: detail.outline(self.coarse) for name, detail in carried.items()}
        return Kept(self.chunks, self.selected_at, self.weighed_at, outlines, self.coarse, outlined=True)


def _gather(parts: Sequence[tuple[Remembered, int, int]]) -> Remembered:
    """Of chunks (detail, chunks of its batch, slot) one; what was counted from other times is not theirs in common."""
    whole, made = parts[0][0], {}
    for name in (f.name for f in fields(whole)):
        values = [getattr(part, name) for part, _, _ in parts]
        if any(value is None for value in values):
            made[name] = None
        elif name in _TIMES:
            made[name] = values[0] if len(set(values)) == 1 else None
        elif name == "tiles":
            made[name] = values[0]
        else:
            made[name] = _cat([_chunk(v, chunks, slot) for v, (_, chunks, slot) in zip(values, parts)])
    apart = {name for name in _TIMES if len({getattr(part, name) for part, _, _ in parts}) > 1}
    made |= dict.fromkeys(("drift", "drift_from") if apart & {"full_at", "drift_from"} else ())
    made |= dict.fromkeys(("beyond",) if apart else ())
    return type(whole)(**made)


def _chunk(value: Merge | Destinations | Tensor, chunks: int, slot: int) -> Merge | Destinations | Tensor:
    if isinstance(value, Tensor):
        return value[slot * len(value) // chunks : (slot + 1) * len(value) // chunks]
    size = len(value.kept if isinstance(value, Merge) else value.index)
    return value.images(slot * size // chunks, (slot + 1) * size // chunks)


def _cat(values: list) -> Merge | Destinations | Tensor:
    return torch.cat(values) if isinstance(values[0], Tensor) else type(values[0]).cat(values)


# --------------------------------------------------------------------------- samples, cells, judgement


def samples(rows: Tensor) -> Tensor:
    """Some rows of [B, K, ...], from all over the picture: enough to judge the others by."""
    return rows[:, :: rows.shape[1] // SAMPLES | 1]


def _as_drift(tokens: Tensor, tiles: Tiles, coarse: bool) -> Tensor:
    """Of tokens [B, N, C] as much as is remembered of their drift: themselves, or [B, cells, C]."""
    return cells(tokens, tiles) if coarse else tokens


def cells(tokens: Tensor, tiles: Tiles) -> Tensor:
    """Means over cells of the token grid: [B, N, C] -> [B, cells, C]. At an odd edge a token counts twice."""
    return Tiles.of(tiles.height, tiles.width, CELL).split(tokens).mean(2)


def grown(values: Tensor, tiles: Tiles) -> Tensor:
    """The value of its cell for each token, [B, N, C]; of tokens already, those."""
    if values.shape[1] == tiles.tokens:
        return values
    small = Tiles.of(tiles.height, tiles.width, CELL)
    return small.join(values.unsqueeze(2).expand(-1, -1, small.size, -1))


def steadiness(expected: Tensor, real: Tensor) -> Tensor:
    """How far a change is to be expected again, 0 to 1 for each picture, by how an expected one came true: wholly
    if at least half of it did. Both [B, K, C] -> [B, 1, 1], fp32

    Where a sampler adds noise at each step, changes are followed by others that half undo them: there it is 0.
    """
    return (_factor(expected, real, (1, 2)) + 0.5).clamp_(0.0, 1.0)


def believable(seen: Tensor, real: Tensor, share: float) -> Tensor:
    """How much of a change that merged blocks saw is to be believed: the factor, from 0 to 1 for each channel,
    that takes it nearest to `share` of the change that was real. Both [B, K, C] -> [B, 1, C], fp32

    Blocks that see a part of the tokens answer to that as well, and what they answer is not all a change.
    """
    return (_factor(seen, real, (1,)) * share).clamp_(0.0, 1.0)


def _factor(seen: Tensor, real: Tensor, over: tuple[int, ...]) -> Tensor:
    """What takes `seen` nearest to `real`, if multiplied by it; one for all along these sides, fp32."""
    seen = seen.float()
    factor = (seen * real).sum(over, keepdim=True) / seen.square().sum(over, keepdim=True)
    return factor.nan_to_num_(0.0, 0.0, 0.0)


def finite(x: Tensor) -> Tensor:
    """x itself, in half precision with what overflowed at the largest number there is, as ComfyUI does it in
    Flux's blocks: else a difference of two such numbers would be none."""
    if x.dtype is not torch.float16:
        return x
    most = torch.finfo(x.dtype).max
    return x.clamp_(-most, most)
