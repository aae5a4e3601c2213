"""One call of the network: what each block does with its tokens.

Blocks that follow one another form a row. The first block of a row takes the kept tokens, they ride through all its
blocks, and the last one gives back to all tokens. Where merging is done block by block, as published, each block is a
row by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from .chunks import ChunkState
from .merge import TEMPERATURE, Merge, Select, finite, reselect, weigh
from .plan import Action
from .selection import keep_count
from .settings import Settings
from .tiles import Tiles

Grid = tuple[int, int]


class Unmergeable(Exception):
    """This call of the network can't go on merged; it is to be run again in full. The message says why."""


@dataclass(frozen=True)
class Block:
    """A transformer block, by where it stands. All blocks of one `share` and token grid use the same merge; a skipped
    one always works on all tokens."""

    row: str
    share: str
    index: int
    last: bool
    skipped: bool = False

    def merge_name(self, grid: Grid) -> str:
        return f"{self.share} {grid[0]}x{grid[1]}"


@dataclass(frozen=True)
class Counted:
    """What a block worked on: the image's tokens before and after merging, others in the same sequence (references, and
    in blocks of one stream the text), the text's where it is apart, and the channels."""

    grid: Grid
    before: int
    after: int
    beside: int
    text: int
    channels: int


@dataclass
class Ride:
    """A row under way: its merge, how many tokens it stands for, the kept ones [B, K, C] as they came in, and, where
    they are needed again, all tokens [B, N, C]."""

    merge: Merge
    count: int
    kept: Tensor
    tokens: Tensor | None


class Evaluation:
    """What the blocks of one call of the network do: `action` says what is renewed, `state` what earlier calls kept.

    Merged tokens are the means of their group, M x, and the last block of a row gives x + U (row(M x) - M x). With
    `in_x0` destinations stand for themselves, and the last block gives every token a copy of its destination, which is
    replaced outside of the network (clean.py)."""

    def __init__(
        self,
        settings: Settings,
        action: Action,
        state: ChunkState,
        before: ChunkState | None = None,
        in_x0: bool = False,
        select: Select = reselect,
        grid: Grid = (0, 0),
        inputs: dict | None = None,
    ) -> None:
        self.settings = settings
        self.action = action
        self.state = state
        self.before = before  # what the same chunks had kept at the call before; with `in_x0` its destinations rest
        self.in_x0 = in_x0
        self.select = select
        self.grid = grid  # of the tokens, where it is one for all blocks
        self.inputs = inputs or {}  # of the network
        self.riding: dict[str, Ride] = {}
        self.renewed: dict[str, tuple[Block, Grid, Merge]] = {}
        self.counted: dict[tuple[str, int], Counted] = {}
        self.scratch: dict = {}  # of the family: what is the same for all blocks of this call
        self.merged_any = False  # whether any row was merged

    def __deepcopy__(self, memo: dict) -> Evaluation:
        return self  # packs copy the options of a model deeply

    @property
    def merges(self) -> bool:
        return self.action is not Action.NONE

    def enter(self, block: Block, x: Tensor, grid: Grid, beside: int = 0, text: int = 0) -> tuple[Tensor, Merge | None]:
        """What a block is to run on, [B, K, C], and the merge that made it; None: all tokens. x is [B, N, C], or in a
        row under way what the block before gave, [B, K, C]. For `beside` and `text` see Counted."""
        if not self.merges or block.skipped:
            self.count(block, grid, x.shape[2], x.shape[1], x.shape[1], beside, text)
            return x, None
        ride = self.riding.get(block.row)
        if ride is None:
            if x.shape[1] != prod(grid):
                raise Unmergeable(f"a block got {x.shape[1]} tokens of a grid of {grid[0]}x{grid[1]}")
            merge = self.merge_for(block, x, grid)
            kept = merge.take(x) if self.in_x0 else merge.merge(x)
            self.merged_any = True
            ride = self.riding[block.row] = Ride(merge, x.shape[1], kept, None if self.in_x0 else x)
        elif x.shape[1] != ride.kept.shape[1]:
            raise Unmergeable("another node changed the number of tokens between two blocks")
        else:
            kept = x
        self.count(block, grid, x.shape[2], ride.count, kept.shape[1], beside, text)
        return kept, ride.merge

    def tokens_now(self, block: Block, count: int) -> int:
        """How many of an image's `count` tokens come into this block."""
        ride = self.riding.get(block.row)
        return count if ride is None else ride.kept.shape[1]

    def leave(self, block: Block, out: Tensor) -> Tensor:
        """What a block hands on, of what it made of the tokens that it was given: [B, K, C], after the last block of
        a row [B, N, C]."""
        ride = self.riding.get(block.row)
        if ride is None or not block.last:
            return out
        del self.riding[block.row]
        if ride.tokens is None:
            return ride.merge.copied(out)
        return finite(ride.merge.residual(ride.tokens, finite(out - ride.kept)))

    def count(
        self, block: Block, grid: Grid, channels: int, before: int, after: int, beside: int = 0, text: int = 0
    ) -> None:
        """Notes what this block works on."""
        self.merged_any = self.merged_any or after < before
        self.counted[block.row, block.index] = Counted(grid, before, after, beside, text, channels)

    def merge_for(self, block: Block, x: Tensor, grid: Grid) -> Merge:
        """The merge of this block, renewed if the plan says so and this block is the first to ask."""
        if (block.row, block.index) in self.counted:
            raise Unmergeable("another node runs the network more than once in one call")
        name = block.merge_name(grid)
        if name not in self.state.merges or (self.action is not Action.REUSE and name not in self.renewed):
            self.choose(block, x, grid)
        merge = self.state.merges[name]
        if len(merge.kept) != len(x):
            raise Unmergeable("another node runs the network on a part of the batch")
        return merge

    def choose(self, block: Block, features: Tensor, grid: Grid) -> None:
        """Select and weigh by features [B, N, C]; a reweight keeps the destinations it has."""
        name, settings = block.merge_name(grid), self.settings
        tiles = Tiles.of(*grid, settings.tile_size)
        split = tiles.split(features)
        if self.action is Action.REWEIGHT and name in self.state.merges:
            merge = weigh(split, self.state.merges[name].destinations, tiles)
        else:
            keep = keep_count(tiles.tokens, settings.ratio)
            had = self.before.merges.get(name) if self.before and self.in_x0 else None
            merge = self.select(split, keep, tiles, TEMPERATURE, settings.budget, had.destinations if had else None)
        self.state.merges[name] = merge
        self.renewed[name] = (block, grid, merge)
