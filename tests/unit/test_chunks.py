"""What the chunks of batches keep, put together in the order of another batch."""

from __future__ import annotations

import pytest
import torch
from comfyui_toma.toma_core.chunks import ChunkState
from comfyui_toma.toma_core.merge import Merge, reselect
from comfyui_toma.toma_core.tiles import Tiles


def check_gather(budget: str) -> None:
    """Chunks of two batches, put together in another order, each keep what is theirs."""
    tiles = Tiles.of(10, 11, 4)
    x = torch.randn(6, 110, 16, generator=torch.Generator().manual_seed(2))
    merges = [reselect(tiles.split(part), 40, tiles, budget=budget) for part in (x[:4], x[4:])]
    first = ChunkState(2, 5, 5, {"m": merges[0], "only here": merges[0]}, x[:4], used_at=9)
    second = ChunkState(1, 3, 4, {"m": merges[1]}, x[4:])
    both = ChunkState.gather([(second, 0), (first, 1), (first, 0)])
    order = [4, 5, 2, 3, 0, 1]
    assert (both.chunks, both.selected_at, both.weighed_at) == (3, 3, 4)
    assert torch.equal(both.clean, x[order])
    assert set(both.merges) == {"m"}, "what not all have nobody has"
    got = both.merges["m"]
    alone: list[Merge] = [merges[i // 4].images(i % 4, i % 4 + 1) for i in order]
    assert torch.equal(got.kept, torch.cat([merge.kept for merge in alone]))
    assert torch.allclose(got.merge(x[order]), torch.cat([m.merge(x[i : i + 1]) for m, i in zip(alone, order)]))
    rows = got.take(x[order])
    assert torch.equal(rows, torch.cat([m.take(x[i : i + 1]) for m, i in zip(alone, order)]))
    assert torch.allclose(got.unmerge(rows), torch.cat([m.unmerge(row[None]) for m, row in zip(alone, rows)]))
    assert torch.equal(got.copied(rows), torch.cat([m.copied(row[None]) for m, row in zip(alone, rows)]))


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
def test_chunks_are_put_together_in_order(budget):
    check_gather(budget)


def whole() -> ChunkState:
    tiles, x = Tiles.of(4, 4, 2), torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    return ChunkState(2, 1, 2, {"m": reselect(tiles.split(x), 8, tiles)}, x)


def test_the_same_batch_again_copies_no_tensor_and_shares_no_state():
    """A call that fails half-way must not have written into what the last one left."""
    kept = whole()
    again = ChunkState.gather([(kept, 0), (kept, 1)])
    assert again.clean is kept.clean and again.merges["m"] is kept.merges["m"]
    again.merges["n"] = again.merges["m"]
    again.selected_at = 7
    assert set(kept.merges) == {"m"} and kept.selected_at == 1


def test_a_part_of_a_batch():
    kept = whole()
    one = ChunkState.gather([(kept, 1)])
    assert one.chunks == 1 and torch.equal(one.clean, kept.clean[1:])
    assert torch.equal(one.merges["m"].kept, kept.merges["m"].kept[1:])


def test_without_a_clean_estimate_of_all_there_is_none():
    kept, other = whole(), whole()
    other.clean = None
    assert ChunkState.gather([(kept, 0), (other, 0)]).clean is None
