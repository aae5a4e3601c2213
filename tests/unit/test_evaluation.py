"""What the blocks of one call do with their tokens, on blocks that are plain functions."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from comfyui_toma.toma_core.chunks import ChunkState
from comfyui_toma.toma_core.evaluation import Block, Evaluation, Unmergeable
from comfyui_toma.toma_core.merge import reselect, weigh
from comfyui_toma.toma_core.plan import Action
from comfyui_toma.toma_core.settings import Settings
from comfyui_toma.toma_core.tiles import Tiles

GRID = (8, 8)
ROW = [Block("row", "row", i, last=i == 2) for i in range(3)]
WEIGHTS = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(4)) / 4


def drawn(seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(index: int, tokens: torch.Tensor) -> torch.Tensor:
    return tokens + (tokens @ WEIGHTS[index]).tanh()


def through(evaluation: Evaluation, x: torch.Tensor, row=ROW, seen: list | None = None) -> torch.Tensor:
    for block in row:
        tokens, _ = evaluation.enter(block, x, GRID)
        if seen is not None:
            seen.append(tokens.shape[1])
        x = evaluation.leave(block, run(block.index, tokens))
    return x


def merged(action: Action = Action.RESELECT, state: ChunkState | None = None, **about) -> Evaluation:
    settings = Settings(**{"ratio": 0.75, **about.pop("settings", {})})
    return Evaluation(settings, action, state or ChunkState(1), **about)


def check_row() -> None:
    """x + U (row(M x) - M x): merged once, given back once."""
    x, seen = drawn(), []
    evaluation = merged()
    out = through(evaluation, x.clone(), seen=seen)
    tiles = Tiles.of(*GRID, 8)
    merge = reselect(tiles.split(x), 16, tiles)
    tokens = row = merge.merge(x)
    for index in range(3):
        row = run(index, row)
    assert seen == [16, 16, 16] and out.shape == x.shape
    assert torch.allclose(out, x + merge.unmerge(row - tokens), atol=1e-5)
    assert not evaluation.riding


def test_a_row_by_the_formula():
    check_row()


def test_copies_of_the_kept_tokens():
    """For a network whose kept tokens are corrected outside of it: no token but the kept ones is held."""
    x = drawn()
    evaluation = merged(in_x0=True)
    out = through(evaluation, x)
    merge = evaluation.state.merges["row 8x8"]
    rows = merge.take(out)
    assert torch.equal(out, merge.copied(rows))
    assert torch.allclose(rows, run(2, run(1, run(0, merge.take(x)))), atol=1e-6)


def test_blocks_of_their_own_merge_each_by_itself():
    """As published: means of tokens, and the residual of each block."""
    x, settings = drawn(), {"merge": "each layer"}
    row = [Block(f"block {i}", "all", i, last=True) for i in range(3)]
    evaluation = merged(settings=settings)
    out = through(evaluation, x, row)
    tiles = Tiles.of(*GRID, 8)
    merge = reselect(tiles.split(x), 16, tiles)
    assert list(evaluation.state.merges) == ["all 8x8"], "one merge for all of them"
    for index in range(3):
        tokens = merge.merge(x)
        x = x + merge.unmerge(run(index, tokens) - tokens)
    assert torch.allclose(out, x, atol=1e-4)


def test_left_alone_and_skipped():
    x, plain = drawn(), drawn()
    for index in range(3):
        plain = run(index, plain)
    assert torch.equal(through(merged(Action.NONE), x), plain)
    skipped = [Block("row", "row", i, last=i == 2, skipped=True) for i in range(3)]
    assert torch.equal(through(merged(), x, skipped), plain)
    seen: list[int] = []
    first_skipped = [Block("row", "row", i, last=i == 2, skipped=i == 0) for i in range(3)]
    through(merged(), x, first_skipped, seen)
    assert seen == [64, 16, 16]


def test_what_is_reused_reweighted_and_reselected():
    x, later = drawn(), drawn(1)
    state = ChunkState(1)
    through(merged(state=state), x)
    first = state.merges["row 8x8"]
    reused = merged(Action.REUSE, state)
    through(reused, later)
    assert state.merges["row 8x8"] is first and not reused.renewed
    reweighted = merged(Action.REWEIGHT, state)
    through(reweighted, later)
    now, tiles = state.merges["row 8x8"], Tiles.of(*GRID, 8)
    assert now.destinations is first.destinations and list(reweighted.renewed) == ["row 8x8"]
    assert torch.equal(now.up, weigh(tiles.split(later), first.destinations, tiles).up)
    through(merged(state=state), later)
    assert not torch.equal(state.merges["row 8x8"].kept, first.kept)


@pytest.mark.parametrize("copies", [True, False])
def test_what_was_picked_rests_where_it_stands_for_itself(copies):
    x = drawn()
    state, before = ChunkState(1), ChunkState(1)
    through(merged(state=before, settings={"ratio": 0.5}), x)
    through(merged(state=state, before=before, in_x0=copies, settings={"ratio": 0.5}), x)
    for then, now in zip(before.merges["row 8x8"].kept, state.merges["row 8x8"].kept):
        assert len(set(then.tolist()) & set(now.tolist())) == (0 if copies else 32)


def test_grids_and_rows_keep_to_themselves():
    x = drawn()
    evaluation = merged()
    through(evaluation, x)
    other = [Block("other", "other", 0, last=True)]
    through(evaluation, x, other)
    smaller = Block("smaller", "other", 0, last=True)
    tokens, _ = evaluation.enter(smaller, x[:, :32], (4, 8))
    evaluation.leave(smaller, tokens)
    assert set(evaluation.state.merges) == {"row 8x8", "other 8x8", "other 4x8"}


@pytest.mark.parametrize("change", [lambda x: x[:, :9], lambda x: torch.cat((x, x), 1)])
def test_tokens_that_another_node_has_changed_in_number(change):
    evaluation = merged()
    tokens, _ = evaluation.enter(ROW[0], drawn(), GRID)
    with pytest.raises(Unmergeable, match="number of tokens"):
        evaluation.enter(ROW[1], change(evaluation.leave(ROW[0], tokens)), GRID)


def test_what_blocks_worked_on_is_counted():
    evaluation = merged()
    assert evaluation.tokens_now(ROW[0], 64) == 64
    kept, _ = evaluation.enter(ROW[0], drawn(), GRID)
    evaluation.enter(ROW[1], kept, GRID, beside=3, text=7)
    assert evaluation.tokens_now(ROW[2], 64) == 16
    counted = evaluation.counted["row", 1]
    assert (counted.before, counted.after, counted.text, counted.beside, counted.channels) == (64, 16, 7, 3, 16)


def test_in_half_precision_sums_are_cut_off():
    x = drawn(dtype=torch.float16)
    evaluation = merged()
    block = Block("row", "row", 0, last=True)
    tokens, _ = evaluation.enter(block, x, GRID)
    out = evaluation.leave(block, torch.full_like(tokens, torch.inf))
    assert torch.isfinite(out).all() and out.max() > 6e4


def test_a_deep_copy_is_the_same_evaluation():
    evaluation = merged()
    assert deepcopy({"toma": evaluation})["toma"] is evaluation


def test_a_rival_selects():
    asked = []

    def rival(features, keep, *rest):
        asked.append(keep)
        return reselect(features, keep, *rest)

    through(merged(select=rival), drawn())
    assert asked == [16]


def test_a_part_of_the_batch_and_a_second_time():
    """Another node that runs the network in halves: neither takes what belongs to the other."""
    x, state = drawn(), ChunkState(1)
    through(merged(state=state), x)
    with pytest.raises(Unmergeable, match="part of the batch"):
        merged(Action.REUSE, state).enter(ROW[0], x[:1], GRID)
    evaluation = merged()
    through(evaluation, x[:1])
    with pytest.raises(Unmergeable, match="more than once"):
        evaluation.enter(ROW[0], x[1:], GRID)
