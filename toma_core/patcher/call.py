"""One evaluation of the model: what each of its blocks does with its tokens.

A call carries, in the order of its batch, the merges and the remembered detail that its blocks need, so
that a block only looks them up by name. It knows nothing of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..merge import TEMPERATURE, Merge, reselect, weigh
from ..schedule import Action
from ..selection import keep_count
from ..settings import Settings
from ..tiles import Tiles
from .compiled import uncompiled
from .detail import Detail, Kept, finite, samples
from .memory import NoMemoryToMerge, raise_unless_out_of_memory

# Called with the tokens of a block, [B, n, C], and the merge that made them (None: all tokens, which it
# may then overwrite, as ComfyUI's Flux blocks do).
RunBlock = Callable[[Tensor, "Merge | None"], Tensor]
Grid = tuple[int, int]
# Of a block: the picture's tokens before and after merging, those in the same sequence that are neither
# picture nor text (reference latents), and the channels.
Counted = tuple[Grid, int, int, int, int]
OUT_OF_MEMORY = "merging ran out of memory"
RAN_TWICE = "another node runs the network more than once in one call: whose tokens these are is not known"
UNPROVEN = 0.5  # how far changes are believed before a second full step has shown what they are worth
SOFTNESS = 3.0  # see `softness`


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
        self.renewed: set[str] = set()
        self.sums: dict[str, Tensor] = {}  # of spans that are under way: what their blocks have added so far
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
        if self.full or (self.settings.carries and place.merge_name(grid) not in self.kept.details):
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

    def give_up(self, x: Tensor, run_block: RunBlock, why: str = OUT_OF_MEMORY) -> Tensor:
        """The rest of this call runs unmerged, and nothing of it is kept."""
        self.action = Action.LEAVE
        self.reasons.append(why)
        self.full = False
        self.sums.clear()
        return run_block(x, None)

    def merge_for(self, place: Place, x: Tensor, grid: Grid) -> Merge:
        """The merge of this block, renewed if the schedule says so and this block is the first to ask."""
        name = place.merge_name(grid)
        if name not in self.kept.details or (self.action is not Action.REUSE and name not in self.renewed):
            self._choose(place, x, grid)
        return self.kept.details[name].merge

    def _choose(self, place: Place, features: Tensor, grid: Grid) -> Detail:
        """Select and weigh by features [B, N, C]; a reweight keeps the destinations it has."""
        name, kept, carries = place.merge_name(grid), self.kept, self.settings.carries
        tiles = Tiles.of(*grid, self.settings.tile_size)
        split = tiles.split(features)
        if self.action is Action.REWEIGHT and name in kept.details:
            merge = weigh(split, kept.details[name].merge.destinations, tiles)
        else:
            last = kept.before.details.get(name) if kept.before else None
            merge = reselect(
                split,
                keep_count(tiles.tokens, self.settings.ratio),
                tiles,
                softness(tiles) if carries else TEMPERATURE,
                self.settings.budget,
                last.destinations if last else None,
            )
        kept.details[name] = Detail(merge)
        self.renewed.add(name)
        if self.record:
            self.chosen[name] = (place, grid, merge)
        return kept.details[name]

    def _full(self, place: Place, x: Tensor, grid: Grid, run_block: RunBlock) -> Tensor:
        """An unmerged block of a step that picks: the span's sum of (output - input) is remembered.

        Between blocks only ControlNet adds to the tokens; without it the sum telescopes. Another node may
        leave out a block: a span whose first block did not run is merged without remembered detail.
        """
        sums, name = self.sums, place.merge_name(grid)
        if name in self.renewed:
            return self.give_up(x, run_block, RAN_TWICE)
        try:
            if place.first:
                sums[name] = -x
            elif self.control and name in sums:
                sums[name] -= x
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            return self.give_up(x, run_block)
        x = run_block(x, None)
        try:
            if name in sums and (place.last or self.control):
                finite(sums[name].add_(x))
            if place.last:
                uncompiled(self._remember, place, sums.pop(name, None), x, grid)
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            self.give_up(x, lambda tokens, _: tokens)
        return x

    def _remember(self, place: Place, added: Tensor | None, x: Tensor, grid: Grid) -> None:
        """What the blocks of a span added to its tokens [B, N, C], which are x now."""
        detail, before = self._choose(place, x if added is None else added, grid), self.kept.before
        if added is not None:
            detail.added, detail.full_at = added, self.at
            if before and (outline := before.details.get(place.merge_name(grid))):
                detail.learn(outline, self.kept.coarse)

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
            change, base = out - tokens, x
            detail = self.kept.details[place.merge_name(grid)]
            if detail.added is not None:
                expected = uncompiled(detail.expected, self.at) if place.last else None
                of_kept = None if expected is None else uncompiled(merge.take, expected)
                change = self._counted(place, detail, change, of_kept)
                base = x if expected is None else finite(x + expected)
            out = finite(uncompiled(merge.residual, base, finite(change)))
            self.count(place, grid, x, tokens.shape[1])
            return out
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            out = tokens = change = base = None
        return self.give_up(x, run_block)

    def _counted(self, place: Place, detail: Detail, change: Tensor, expected: Tensor | None) -> Tensor:
        """What is to be spread after a block that added `change` [B, K, C] to the kept tokens: until the last
        block of the span that itself; then what is believed of all that was not `expected`, less what is
        spread already."""
        spread = None if place.first else self.spread.get(place.span)
        so_far = change if spread is None else finite(spread + change)
        if expected is None:
            self.spread[place.span] = so_far
            return change
        self.spread.pop(place.span, None)
        beyond = finite(so_far - expected)
        detail.beyond, detail.merged_at = samples(beyond).clone(), self.at
        believed = beyond * (UNPROVEN if detail.trust is None else detail.trust)
        return believed if spread is None else believed - spread


def softness(tiles: Tiles) -> float:
    """The temperature of the weights where detail is carried: in a large tile, with its many destinations, as much more
    as keeps a token to those like it."""
    return SOFTNESS * max(1.0, tiles.size / 64)
