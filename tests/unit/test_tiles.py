import pytest
import torch
from comfyui_toma.toma_core.tiles import Tiles
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")
sides = st.integers(1, 40)
tile_sizes = st.sampled_from((0, 1, 2, 3, 4, 8, 16))


@given(sides, sides, tile_sizes)
def test_split_and_join_are_exact_inverses(height, width, tile):
    tiles = Tiles.of(height, width, tile)
    x = torch.randn(2, height * width, 3)
    split = tiles.split(x)
    assert split.shape == (2, tiles.count, tiles.size, 3)
    assert torch.equal(tiles.join(split), x)


@given(sides, sides, tile_sizes)
def test_each_token_is_in_one_tile_with_at_most_one_padding(height, width, tile):
    tiles = Tiles.of(height, width, tile)
    order = tiles.order(CPU).view(tiles.count, tiles.size)
    real = torch.ones_like(order, dtype=torch.bool) if tiles.real is None else tiles.real
    assert order[real].sort().values.tolist() == list(range(tiles.tokens))
    held = real.sum(-1)
    assert held.max() == tiles.size and held.min() >= tiles.size - 1
    for places, there in zip(order, real, strict=True):
        assert set(places[~there].tolist()) <= set(places[there].tolist()), "padding repeats a token of its tile"


@given(sides, sides, tile_sizes)
def test_add_is_x_plus_join(height, width, tile):
    tiles = Tiles.of(height, width, tile)
    x, y = torch.randn(2, height * width, 3), torch.randn(2, tiles.count, tiles.size, 3)
    assert torch.equal(tiles.add(x, y), x + tiles.join(y))
    wide = torch.randn(2, 5 + height * width, 3)
    assert torch.equal(tiles.add(wide[:, 5:], y), wide[:, 5:] + tiles.join(y))


def test_square_tiles_are_the_squares_of_the_grid():
    grid = torch.arange(16 * 24).view(16, 24)
    split = Tiles.of(16, 24, 8).split(grid.view(1, -1, 1))[0, :, :, 0]
    squares = [grid[r : r + 8, c : c + 8].flatten() for r in (0, 8) for c in (0, 8, 16)]
    assert torch.equal(split, torch.stack(squares))


@pytest.mark.parametrize("height, width", [(64, 64), (61, 67), (96, 41), (33, 100), (160, 90), (8, 9)])
@pytest.mark.parametrize("tile", [4, 8, 16])
def test_tiles_are_compact(height, width, tile):
    """As compact as squares, within reason: no token is far from the middle of its tile."""
    tiles = Tiles.of(height, width, tile)
    order = tiles.order(CPU).view(tiles.count, tiles.size)
    y, x = (order // width).double(), (order % width).double()
    spread = (y.var(-1, correction=0) + x.var(-1, correction=0)).sqrt() / tile  # 0.41 for a square
    assert spread.mean() < 0.6
    assert spread.max() < 1.2


def test_few_tokens_are_padding_and_none_on_multiples():
    for side in range(8, 161):
        for width in (side, 97):
            tiles = Tiles.of(side, width, 8)
            assert tiles.count * tiles.size - tiles.tokens < tiles.count
    assert Tiles.of(64, 96, 8).real is None and Tiles.of(7, 11, 0).real is None


def test_tiles_are_hashable_and_shared():
    assert Tiles.of(9, 7, 4) is Tiles.of(9, 7, 4)
    assert hash(Tiles.of(9, 7, 4)) != hash(Tiles.of(7, 9, 4))
