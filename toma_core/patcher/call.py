"""One evaluation of the model: what each of its blocks does with its tokens.

A call carries, in the order of its batch, the merges and the remembered detail that its blocks need, so
that a block only looks them up by name. It knows nothing of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..merge import Merge, reselect, weigh
from ..schedule import Action
from ..selection import keep_count
from ..settings import Settings
from ..tiles import Tiles
from .compiled import uncompiled
from .memory import NoMemoryToMerge, raise_unless_out_of_memory

# Called with the tokens of a block, [B, n, C], and the merge that made them (None: all tokens, which it
# may then overwrite, as ComfyUI's Flux blocks do).
RunBlock = Callable[[Tensor, "Merge | None"], Tensor]
Grid = tuple[int, int]
# Of a block: the picture's tokens before and after merging, those in the same sequence that are neither
# picture nor text (reference latents), and the channels.
Counted = tuple[Grid, int, int, int, int]
OUT_OF_MEMORY = "merging ran out of memory"
UNPROVEN = 0.5  # how far changes are believed before a second full step has shown what they are worth
SAMPLES = 256  # kept tokens whose change is remembered to judge by: from about this many to twice as many
SOFTNESS = 3.0  # see `softness`
CELL = 2  # tokens a side that share one drift, where it is coarse


@dataclass(frozen=True)
class Place:
    """Where a block stands. A span is a row of blocks that are merged alike, one after the other; all
    blocks of one `share` and token grid use the same merge. A skipped one always works on all tokens."""

    span: str
    share: str
    index: int
    first: bool
    last: bool
    skipped: bool = False

    def merge_name(self, grid: Grid) -> str:
        return f"{self.share} {grid[0]}x{grid[1]}"


@dataclass
class Kept:
    """What a batch of `chunks` equal parts keeps from call to call, all by merge name."""

    chunks: int
    selected_at: int
    weighed_at: int
    merges: dict[str, Merge] = field(default_factory=dict)
    # What the blocks added at the full step [B, N, C]; of an outline, if coarse, to cells.
    added: dict[str, Tensor] = field(default_factory=dict)
    # How that has changed since the full step before [B, N, C], if coarse of cells; of an outline samples. And how far
    # it is expected to go on so [B, 1, 1].
    drift: dict[str, Tensor] = field(default_factory=dict)
    steady: dict[str, Tensor] = field(default_factory=dict)
    # What the last merged step saw beyond that, samples; and how far such tales are believed [B, 1, C].
    beyond: dict[str, Tensor] = field(default_factory=dict)
    trust: dict[str, Tensor] = field(default_factory=dict)
    # Where in the schedule: the full step, the one before it, and the last merged one.
    full_at: dict[str, float] = field(default_factory=dict)
    drift_from: dict[str, float] = field(default_factory=dict)
    merged_at: dict[str, float] = field(default_factory=dict)
    before: Kept | None = None  # in a call that chooses: the outline of what there was before
    coarse: bool = False
    # An outline has samples of `added`, too, and nothing can be merged by it.
    outlined: bool = False
    sampled: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def gather(cls, parts: Sequence[tuple[Kept, int]]) -> Kept:
        """One batch from the chunks (kept, slot) of others. The whole of one batch is that batch itself."""
        whole = parts[0][0]
        if len(parts) == whole.chunks and all(p[0] is whole and p[1] == i for i, p in enumerate(parts)):
            return whole
        made = cls(
            len(parts),
            min(kept.selected_at for kept, _ in parts),
            min(kept.weighed_at for kept, _ in parts),
            **{name: _gather(name, parts) for name in _TABLES},
            coarse=whole.coarse,
            **{name: _earliest([getattr(kept, name) for kept, _ in parts]) for name in _PLACES},
        )
        for name in made.full_at:  # how far it has come since is then not the same for all
            if any(kept.interval(name) != made.interval(name) for kept, _ in parts):
                made.drift.pop(name, None)
                made.beyond.pop(name, None)
        return made

    def interval(self, name: str) -> tuple[float, float | None]:
        """Where the full step was, and the one that the drift is counted from."""
        return self.full_at[name], self.drift_from.get(name)

    def outline(self) -> Kept:
        """What of this the next full step learns from: what was added, if coarse to cells, and samples."""
        rows = {name: self.merges[name].outline(samples(self.merges[name].kept)) for name in self.full_at}
        return Kept(
            self.chunks,
            self.selected_at,
            self.weighed_at,
            merges=rows,
            added={name: self.as_drift(self.added[name], merge.tiles) for name, merge in rows.items()},
            sampled={name: merge.take(self.added[name]) for name, merge in rows.items()},
            drift={
                name: rows[name].take(grown(drift, rows[name].tiles)) for name, drift in self.drift.items()
            },
            coarse=self.coarse,
            outlined=True,
            **{name: dict(getattr(self, name)) for name in ("steady", "beyond", "trust", *_PLACES)},
        )

    def as_drift(self, tokens: Tensor, tiles: Tiles) -> Tensor:
        """Of tokens [B, N, C] as much as is remembered of their drift."""
        return cells(tokens, tiles) if self.coarse else tokens


_TABLES = ("merges", "added", "sampled", "drift", "steady", "beyond", "trust")
_PLACES = ("full_at", "drift_from", "merged_at")


def _earliest(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: min(t[key] for t in tables) for key in tables[0] if all(key in t for t in tables)}


def _gather(name: str, parts: Sequence[tuple[Kept, int]]) -> dict:
    tables = [getattr(kept, name) for kept, _ in parts]
    both = [key for key in tables[0] if all(key in table for table in tables)]
    return {key: _cat([_chunk(table[key], *part) for table, part in zip(tables, parts)]) for key in both}


def _chunk(value: Merge | Tensor, kept: Kept, slot: int) -> Merge | Tensor:
    size = len(value if isinstance(value, Tensor) else value.kept)
    first, last = slot * size // kept.chunks, (slot + 1) * size // kept.chunks
    return value[first:last] if isinstance(value, Tensor) else value.images(first, last)


def _cat(values: list[Merge] | list[Tensor]) -> Merge | Tensor:
    return torch.cat(values) if isinstance(values[0], Tensor) else Merge.cat(values)


class Call:
    """What the blocks of one evaluation do: `action` comes from the schedule, `kept` from earlier calls."""

    def __init__(
        self,
        settings: Settings,
        action: Action,
        kept: Kept,
        step: int = 0,
        latent: Grid = (0, 0),
        control: bool = False,
        record: bool = False,
        at: float = 0.0,
    ) -> None:
        self.settings = settings
        self.action = action
        self.kept = kept
        self.step = step
        self.at = at
        self.latent = latent
        self.control = control
        self.record = record
        # The step that picks runs unmerged and remembers; so does a span whose token grid is new.
        self.full = settings.carries and action is Action.RESELECT
        self.renewed: dict[str, bool] = {}
        self.tokens: dict[tuple[str, int], Counted] = {}
        self.chosen: dict[str, tuple[Place, Grid, Merge]] = {}
        self.reasons: list[str] = []
        self.spread: dict[str, Tensor] = {}
        self.scratch: dict[str, object] = {}
        self.beside = 0

    def block(self, place: Place, x: Tensor, grid: Grid, run_block: RunBlock) -> Tensor:
        """x [B, N, C] through one block, merged as the schedule says; may overwrite x."""
        self.count(place, grid, x, x.shape[1])
        if self.action is Action.LEAVE or place.skipped:
            return run_block(x, None)
        if self.full or (self.settings.carries and place.merge_name(grid) not in self.kept.merges):
            return self._full(place, x, grid, run_block)
        try:
            merge = uncompiled(self.merge_for, place, x, grid)
            tokens = uncompiled(self._shorter, merge, x)
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            merge = tokens = None  # gives up below: here the traceback would hold on to memory
        if merge is None:
            return self.give_up(x, run_block)
        return self._merged(place, x, tokens, grid, merge, run_block)

    def _shorter(self, merge: Merge, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, K, C]. Where detail is carried, destinations stand for their group as they are:
        a mean has less noise than the step says, and the blocks would answer to that."""
        return merge.take(x) if self.settings.carries else merge.merge(x)

    def count(self, place: Place, grid: Grid, x: Tensor, after: int) -> None:
        """Notes how many tokens of x [B, N, C] this block works on."""
        self.tokens[place.span, place.index] = (grid, x.shape[1], after, self.beside, x.shape[2])

    def give_up(self, x: Tensor, run_block: RunBlock) -> Tensor:
        """No memory for merging: the rest of this call runs unmerged, and nothing of it is kept."""
        self.action = Action.LEAVE
        self.reasons.append(OUT_OF_MEMORY)
        self.full = False
        return run_block(x, None)

    def merge_for(self, place: Place, x: Tensor, grid: Grid) -> Merge:
        """The merge of this block, renewed if the schedule says so and this block is the first to ask."""
        merges, name = self.kept.merges, place.merge_name(grid)
        if name not in merges or (self.action is not Action.REUSE and name not in self.renewed):
            self._choose(place, x, grid)
            self.renewed[name] = True
        return merges[name]

    def _choose(self, place: Place, features: Tensor, grid: Grid) -> Merge:
        """Select and weigh by features [B, N, C]; a reweight keeps the destinations it has."""
        name = place.merge_name(grid)
        kept, tiles = self.kept, Tiles.of(*grid, self.settings.tile_size)
        split = tiles.split(features)
        if self.action is Action.REWEIGHT and name in kept.merges:
            kept.merges[name] = weigh(split, kept.merges[name].destinations, tiles)
        else:
            keep, budget = keep_count(tiles.tokens, self.settings.ratio), self.settings.budget
            if self.settings.carries:
                last = kept.before.merges.get(name) if kept.before else None
                kept.merges[name] = reselect(
                    split, keep, tiles, softness(tiles), budget, last.destinations if last else None
                )[1]
            else:
                kept.merges[name] = reselect(split, keep, tiles, budget=budget)[1]
        if self.record:
            self.chosen[name] = (place, grid, kept.merges[name])
        return kept.merges[name]

    def _full(self, place: Place, x: Tensor, grid: Grid, run_block: RunBlock) -> Tensor:
        """An unmerged block of a step that picks: the span's sum of (output - input) is remembered.

        Between blocks only ControlNet adds to the tokens; without it the sum telescopes. Another node may
        leave out a block: a span whose first block did not run is merged without remembered detail.
        """
        added, name = self.kept.added, place.merge_name(grid)
        try:
            if place.first:
                added[name] = -x
            elif self.control and name in added:
                added[name] -= x
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            return self.give_up(x, run_block)
        x = run_block(x, None)
        try:
            if name in added and (place.last or self.control):
                finite(added[name].add_(x))
            if place.last:
                uncompiled(self._remember, place, added.get(name), x, grid)
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            added.pop(name, None)
            self.give_up(x, lambda tokens, _: tokens)
        return x

    def _remember(self, place: Place, added: Tensor | None, x: Tensor, grid: Grid) -> None:
        self._choose(place, x if added is None else added, grid)
        if added is not None:
            name = place.merge_name(grid)
            self._learn(name, added)
            self.kept.full_at[name] = self.at

    def _learn(self, name: str, added: Tensor) -> None:
        """A full step shows what has become of `added` [B, N, C] since the full step before: whether it went on
        as it had begun, how much of what merged steps saw beyond that was real, and how it changes now."""
        before, kept = self.kept.before, self.kept
        if before is None:
            return
        for old, new in ((before.trust, kept.trust), (before.steady, kept.steady)):
            if name in old:
                new[name] = old[name]
        # Large, and not needed again; should this call give up later, the next has to do without.
        earlier = before.added.pop(name, None)
        full_at, merged_at = before.full_at.get(name), before.merged_at.get(name, self.at)
        if earlier is None or full_at is None or not full_at < self.at:
            return
        took, rows = self.at - full_at, before.merges[name]
        real = rows.take(added) - before.sampled[name]
        # Of a change that grows evenly, what there was of it at the last merged step.
        share = (merged_at - full_at) / took
        if name in before.drift:
            drift_from = before.drift_from[name]
            drift = before.drift[name] * (took / (full_at - drift_from))
            # The first drift is not judged: it may start from a step that saw noise alone.
            known = name in before.steady
            kept.steady[name] = steadiness(drift, real) if known else torch.ones_like(real[:, :1, :1])
            real = real - drift * before.steady.get(name, 1.0)
            # The same of what three full steps bend away from a line.
            share *= (merged_at - drift_from) / (self.at - drift_from)
        if name in before.beyond and full_at < merged_at < self.at:
            kept.trust[name] = believable(before.beyond[name], real, share)
        try:
            kept.drift[name] = finite(kept.as_drift(added, rows.tiles) - earlier)
            kept.drift_from[name] = full_at
        except RuntimeError as error:  # one can do without
            raise_unless_out_of_memory(error)

    def _expected(self, name: str, tiles: Tiles) -> Tensor:
        """What a full step would add by now [B, N, C], if it went on as from one full step to the next; for no
        longer than that took, as samplers may go back and caches may skip."""
        kept = self.kept
        if name not in kept.drift:
            return kept.added[name]
        full_at, drift_from = kept.interval(name)
        ahead = min(max((self.at - full_at) / (full_at - drift_from), 0.0), 1.0)
        drift = kept.drift[name] * (ahead * kept.steady.get(name, 1.0))
        return finite(kept.added[name] + grown(drift, tiles))

    def _merged(
        self, place: Place, x: Tensor, tokens: Tensor, grid: Grid, merge: Merge, run_block: RunBlock
    ) -> Tensor:
        """x + U (block(M x) - M x). Over a span with remembered detail all blocks together come to
        x + expected + U (trust * beyond), where beyond = what they added to M x - M expected."""
        try:
            out = run_block(tokens, merge)
        except NoMemoryToMerge:
            tokens = None
        if tokens is None:
            return self.give_up(x, run_block)
        try:
            change = out - tokens
            base, name = x, place.merge_name(grid)
            if name in self.kept.full_at:
                expected = uncompiled(self._expected, name, merge.tiles) if place.last else None
                of_kept = None if expected is None else uncompiled(merge.take, expected)
                change = self._counted(place, name, change, of_kept)
                base = x if expected is None else finite(x + expected)
            out = finite(uncompiled(merge.residual, base, finite(change)))
            self.count(place, grid, x, tokens.shape[1])
            return out
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            out = tokens = change = base = None
        return self.give_up(x, run_block)

    def _counted(self, place: Place, name: str, change: Tensor, expected: Tensor | None) -> Tensor:
        """What is to be spread after a block that added `change` [B, K, C] to the kept tokens: until the last
        block of the span that itself; then what is believed of all that was not `expected`, less what is
        spread already."""
        spread = None if place.first else self.spread.get(name)
        so_far = change if spread is None else finite(spread + change)
        if expected is None:
            self.spread[name] = so_far
            return change
        beyond = finite(so_far - expected)
        self.kept.beyond[name] = samples(beyond).clone()
        self.kept.merged_at[name] = self.at
        believed = beyond * self.kept.trust.get(name, UNPROVEN)
        return believed if spread is None else believed - spread


def softness(tiles: Tiles) -> float:
    """The temperature of the weights where detail is carried: in a large tile, with its many destinations, as much more
    as keeps a token to those like it."""
    return SOFTNESS * max(1.0, tiles.size / 64)


def samples(rows: Tensor) -> Tensor:
    """Some rows of [B, K, ...], from all over the picture: enough to judge the others by."""
    return rows[:, :: rows.shape[1] // SAMPLES | 1]


def cells(tokens: Tensor, tiles: Tiles) -> Tensor:
    """Means over cells of the token grid: [B, N, C] -> [B, cells, C]"""
    return Tiles.of(tiles.height, tiles.width, CELL).split(tokens).mean(2)


def grown(values: Tensor, tiles: Tiles) -> Tensor:
    """The value of its cell for each token, [B, N, C]; of tokens already, those."""
    if values.shape[1] == tiles.tokens:
        return values
    small = Tiles.of(tiles.height, tiles.width, CELL)
    return small.join(values.unsqueeze(2).expand(-1, -1, small.size, -1))


def steadiness(expected: Tensor, real: Tensor) -> Tensor:
    """How far a change is to be expected again, 0 to 1 for each picture, by how an expected one came true: wholly
    if at least half of it did. Both [B, K, C] -> [B, 1, 1]

    Where a sampler adds noise at each step, changes are followed by others that half undo them: there it is 0.
    """
    return (_factor(expected, real, (1, 2)) + 0.5).clamp_(0.0, 1.0).to(real.dtype)


def believable(seen: Tensor, real: Tensor, share: float) -> Tensor:
    """How much of a change that merged blocks saw is to be believed: the factor, from 0 to 1 for each channel,
    that takes it nearest to `share` of the change that was real. Both [B, K, C] -> [B, 1, C]

    Blocks that see a part of the tokens answer to that as well, and what they answer is not all a change.
    """
    return (_factor(seen, real, (1,)) * share).clamp_(0.0, 1.0).to(real.dtype)


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
