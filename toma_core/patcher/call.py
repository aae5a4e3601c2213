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
    """What a batch of `chunks` equal parts keeps from call to call: merges, and what the blocks added to
    every token at the last full step (also at the kept tokens alone), all by merge name."""

    chunks: int
    selected_at: int
    weighed_at: int
    merges: dict[str, Merge] = field(default_factory=dict)
    added: dict[str, Tensor] = field(default_factory=dict)
    added_merged: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def gather(cls, parts: Sequence[tuple[Kept, int]]) -> Kept:
        """One batch from the chunks (kept, slot) of others. The whole of one batch is that batch itself."""
        whole = parts[0][0]
        if len(parts) == whole.chunks and all(p[0] is whole and p[1] == i for i, p in enumerate(parts)):
            return whole
        return cls(
            len(parts),
            min(kept.selected_at for kept, _ in parts),
            min(kept.weighed_at for kept, _ in parts),
            *(_gather(name, parts) for name in ("merges", "added", "added_merged")),
        )


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
    ) -> None:
        self.settings = settings
        self.action = action
        self.kept = kept
        self.step = step
        self.latent = latent
        self.control = control
        self.record = record
        # The step that picks runs unmerged and remembers; so does a span whose token grid is new.
        self.full = settings.carries and action is Action.RESELECT
        self.renewed: dict[str, bool] = {}
        self.tokens: dict[tuple[str, int], Counted] = {}
        self.chosen: dict[str, tuple[Place, Grid, Merge]] = {}
        self.reasons: list[str] = []
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
            keep = keep_count(tiles.tokens, self.settings.ratio)
            kept.merges[name] = reselect(split, keep, tiles, budget=self.settings.budget)[1]
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
        merge = self._choose(place, x if added is None else added, grid)
        if added is not None:
            self.kept.added_merged[place.merge_name(grid)] = self._shorter(merge, added)

    def _merged(
        self, place: Place, x: Tensor, tokens: Tensor, grid: Grid, merge: Merge, run_block: RunBlock
    ) -> Tensor:
        """x + U (block(M x) - M x). After a span's last block the change is counted from its full step:
        x + added + U (block(M x) - M x - M added)."""
        try:
            out = run_block(tokens, merge)
        except NoMemoryToMerge:
            tokens = None
        if tokens is None:
            return self.give_up(x, run_block)
        try:
            change = out - tokens
            base = x
            if place.last and place.merge_name(grid) in self.kept.added_merged:
                base = finite(x + self.kept.added[place.merge_name(grid)])
                change -= self.kept.added_merged[place.merge_name(grid)]
            out = finite(uncompiled(merge.residual, base, finite(change)))
            self.count(place, grid, x, tokens.shape[1])
            return out
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            out = tokens = change = base = None
        return self.give_up(x, run_block)


def finite(x: Tensor) -> Tensor:
    """x itself, in half precision with what overflowed at the largest number there is, as ComfyUI does it in
    Flux's blocks: else a difference of two such numbers would be none."""
    if x.dtype is not torch.float16:
        return x
    most = torch.finfo(x.dtype).max
    return x.clamp_(-most, most)
