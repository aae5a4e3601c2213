"""Merge and unmerge against the formulas, and what the patcher relies on."""

from math import inf

import pytest
import torch
from comfyui_toma.toma_core.merge import Merge, reselect, weigh
from comfyui_toma.toma_core.selection import keep_count, select
from comfyui_toma.toma_core.tiles import Tiles
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

GRIDS = [
    (16, 16, 8, 0.5),
    (16, 16, 8, 0.3),
    (17, 13, 8, 0.5),
    (1, 29, 4, 0.6),
    (5, 3, 8, 0.4),
    (12, 12, 0, 0.75),
]
budgets = st.sampled_from(("equal", "adaptive"))
temperatures = st.sampled_from((1000.0, 20.0, None))


def made(grid=(16, 16, 8, 0.5), temperature: float | None = 1000.0, budget="equal", b=2, c=24, seed=0):
    """Random tokens and their merge."""
    torch.manual_seed(seed)
    height, width, tile, ratio = grid
    tiles = Tiles.of(height, width, tile)
    x = torch.randn(b, tiles.tokens, c)
    merge = reselect(tiles.split(x), keep_count(tiles.tokens, ratio), tiles, temperature, budget)
    return x, merge


def slow_weights(features: Tensor, merge: Merge, temperature: float | None) -> Tensor:
    """A [K, N] of one image from the formula, token by token; features [N, C]."""
    x = torch.nn.functional.normalize(features.double(), dim=-1)
    order = merge.tiles.order(features.device).view(merge.tiles.count, -1).tolist()
    tile_of = {token: t for t, tokens in enumerate(order) for token in tokens}
    kept = merge.kept[0].tolist()
    a = torch.zeros(len(kept), len(x), dtype=torch.float64)
    for token in range(len(x)):
        rows = [r for r, k in enumerate(kept) if tile_of[k] == tile_of[token]]
        if token in kept:
            a[kept.index(token), token] = 1
            continue
        s = x[[kept[r] for r in rows]] @ x[token]
        weights = (s == s.max()).double() if temperature is None else (temperature * s).softmax(0)
        a[rows, token] = weights / weights.sum()
    return a


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("temperature", [1000.0, 20.0, None])
@pytest.mark.parametrize("grid", GRIDS)
def test_both_products_follow_the_formulas(grid, temperature, budget):
    x, merge = made(grid, temperature, budget, b=1)
    a = slow_weights(x[0], merge, temperature)
    m = a / a.sum(1, keepdim=True)
    merged = merge.merge(x)
    assert torch.allclose(merged[0].double(), m @ x[0].double(), atol=2e-3)
    assert torch.allclose(merge.unmerge(merged)[0].double(), a.T @ merged[0].double(), atol=2e-3)
    assert torch.equal(merge.assignment[0], a.argmax(0))


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from((0, 2, 4, 8)),
    st.floats(0, 0.9),
    temperatures,
    budgets,
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
def test_properties(height, width, tile, ratio, temperature, budget, dtype):
    torch.manual_seed(height * width)
    tiles = Tiles.of(height, width, tile)
    x = torch.randn(2, tiles.tokens, 5).to(dtype)
    merge = reselect(tiles.split(x), keep_count(tiles.tokens, ratio), tiles, temperature, budget)
    rows = merge.kept.shape[1]
    merged = merge.merge(x)
    back = merge.unmerge(merged)
    assert merged.shape == (2, rows, 5) and back.shape == x.shape
    assert merged.dtype == back.dtype == dtype
    assert merged.isfinite().all() and back.isfinite().all()
    near = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    assert torch.allclose(merge.residual(x, merged), x + back, atol=near)
    assert (merge.assignment.gather(1, merge.kept) == torch.arange(rows)).all()
    ones = torch.ones_like(x)
    assert torch.allclose(merge.unmerge(merge.merge(ones)), ones, atol=near), "rows of M and columns of A sum to 1"


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", [(16, 16, 8), (9, 7, 4), (5, 5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ratio_0_is_the_identity_bit_for_bit(grid, dtype, budget):
    tiles = Tiles.of(*grid)
    x = torch.randn(2, tiles.tokens, 6).to(dtype)
    merge = reselect(tiles.split(x), keep_count(tiles.tokens, 0.0), tiles, budget=budget)
    assert torch.equal(merge.merge(x), x)
    assert torch.equal(merge.unmerge(x), x)
    assert torch.equal(merge.residual(x, x), x + x)
    assert torch.equal(merge.kept, torch.arange(tiles.tokens).expand(2, -1))
    assert torch.equal(merge.assignment, merge.kept)


@pytest.mark.parametrize("temperature", [1000.0, None])
@pytest.mark.parametrize("budget", ["equal", "adaptive"])
def test_merge_of_identical_tokens_is_exact(temperature, budget):
    tiles = Tiles.of(16, 12, 4)
    x = torch.randn(2, 1, 9).expand(2, 192, 9)
    merge = reselect(tiles.split(x), 96, tiles, temperature, budget)
    assert torch.allclose(merge.merge(x), x[:, :96], rtol=1e-6)
    assert torch.allclose(merge.unmerge(merge.merge(x)), x, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1000.0, None])
@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", [(16, 16, 8), (15, 17, 8), (12, 12, 0)])
def test_groups_of_equal_tokens_come_back(grid, budget, temperature):
    """k distinct tokens a tile, each many times over, and k destinations."""
    torch.manual_seed(2)
    tiles = Tiles.of(*grid)
    groups = torch.randint(0, 6, (2, tiles.tokens))
    x = torch.randn(2, 6, 32).gather(1, groups.unsqueeze(-1).expand(-1, -1, 32))
    merge = reselect(tiles.split(x), 6 * tiles.count, tiles, temperature, budget)
    assert torch.allclose(merge.unmerge(merge.merge(x)), x, atol=1e-5)


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", GRIDS)
def test_hard_weights_merge_back_what_they_unmerged(grid, budget):
    """M U = I: so merging around each block with the residual kept is merging once around all of them."""
    x, merge = made(grid, None, budget)
    y = torch.randn_like(merge.merge(x))
    assert torch.allclose(merge.merge(merge.unmerge(y)), y, atol=1e-5)

    blocks = [torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh()) for _ in range(4)]
    with torch.no_grad():
        each = x
        for block in blocks:
            merged = merge.merge(each)
            each = merge.residual(each, block(merged))
        rows = before = merge.merge(x)
        for block in blocks:
            rows = rows + block(rows)
        once = merge.residual(x, rows - before)
    assert torch.allclose(each, once, atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_hard_weights_are_the_limit_of_soft_ones(grid):
    x, soft = made(grid, 1e7)
    _, hard = made(grid, inf)
    assert torch.equal(soft.kept, hard.kept)
    assert torch.allclose(soft.merge(x), hard.merge(x), atol=1e-5)
    assert torch.allclose(soft.unmerge(soft.merge(x)), hard.unmerge(hard.merge(x)), atol=1e-5)


@pytest.mark.parametrize("dtype, near", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("budget", ["equal", "adaptive"])
def test_half_precision_agrees_with_full(dtype, near, budget):
    torch.manual_seed(8)
    tiles = Tiles.of(16, 16, 8)
    x = torch.randn(2, 256, 40).to(dtype)
    half = reselect(tiles.split(x), 128, tiles, budget=budget)
    full = weigh(tiles.split(x.float()), half.destinations, tiles)
    assert half.down.dtype == half.up.dtype == dtype
    assert torch.allclose(half.merge(x).float(), full.merge(x.float()), atol=near)
    assert torch.allclose(half.unmerge(half.merge(x)).float(), full.unmerge(full.merge(x.float())), atol=near)


def test_fp16_extremes_stay_finite():
    tiles = Tiles.of(16, 16, 8)
    x = (torch.randn(1, 256, 8).sign() * 65504).half()
    for temperature in (1000.0, None):
        merge = reselect(tiles.split(x), 128, tiles, temperature)
        assert merge.merge(x).isfinite().all() and merge.unmerge(merge.merge(x)).isfinite().all()


@pytest.mark.parametrize("bad", [inf, -inf, float("nan"), 1e30])
@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", [(16, 16, 16), (17, 13, 8)])
def test_a_broken_token_breaks_its_tile_at_most(grid, budget, bad):
    """Indices stay in bounds, which a GPU would not forgive."""
    tiles = Tiles.of(*grid)
    x = torch.randn(2, tiles.tokens, 6)
    x[0, 3, 2] = bad
    merge = reselect(tiles.split(x), tiles.tokens // 2, tiles, budget=budget)
    assert all(len(set(kept.tolist())) == tiles.tokens // 2 for kept in merge.kept)
    back = merge.unmerge(merge.merge(x))
    assert back[1].isfinite().all()
    apart = tiles.split(x)[0].isfinite().all(-1).all(-1)
    assert tiles.split(back)[0][apart].isfinite().all()


def test_padding_never_contributes():
    """What stands in the padding changes neither picks nor products."""
    torch.manual_seed(9)
    tiles = Tiles.of(17, 13, 8)
    x = tiles.split(torch.randn(1, 221, 12))
    central = x.mean(2, keepdim=True).expand_as(x) * 10  # what would be picked first
    spoilt = torch.where(tiles.real[None, ..., None], x, central)
    assert not torch.equal(x, spoilt)
    for budget in ("equal", "adaptive"):
        a, b = (reselect(y, 100, tiles, budget=budget) for y in (x, spoilt))
        assert torch.equal(a.kept, b.kept) and torch.equal(a.down, b.down) and torch.equal(a.up, b.up)
        assert (a.down.mT[0][~tiles.real] == 0).all()


def test_features_and_tokens_are_apart():
    """Picked and weighed by one thing, merging another."""
    torch.manual_seed(10)
    tiles = Tiles.of(16, 16, 8)
    features, x = torch.randn(1, 256, 8), torch.randn(1, 256, 40)
    merge = reselect(tiles.split(features), 128, tiles, None)
    group = x[0, merge.assignment[0] == 7]
    assert torch.allclose(merge.merge(x)[0, 7], group.mean(0), atol=1e-6)


def test_reweighing_keeps_the_destinations():
    x, merge = made()
    again = weigh(merge.tiles.split(x.flip(-1) + 0.1 * torch.randn_like(x)), merge.destinations, merge.tiles)
    assert torch.equal(again.kept, merge.kept) and not torch.equal(again.up, merge.up)
    select_again = select(merge.tiles.split(x), 128, merge.tiles)
    assert torch.equal(weigh(merge.tiles.split(x), select_again, merge.tiles).up, merge.up)


def test_reconstruction_improves_as_ratio_falls():
    torch.manual_seed(11)
    tiles = Tiles.of(32, 32, 8)
    rough = torch.nn.functional.interpolate(torch.randn(1, 24, 8, 8), size=(32, 32), mode="bicubic")
    x = (rough + 0.2 * torch.randn_like(rough)).flatten(2).mT.contiguous() + 0.5
    for budget in ("equal", "adaptive"):
        errors = []
        for ratio in torch.linspace(0.9, 0.0, 19).tolist():
            merge = reselect(tiles.split(x), keep_count(1024, ratio), tiles, budget=budget)
            errors.append(float((merge.unmerge(merge.merge(x)) - x).square().mean()))
        rises = [b - a for a, b in zip(errors, errors[1:], strict=False)]
        assert max(rises) <= 1e-6 and errors[-1] == 0


def test_permuting_tiles_permutes_rows():
    torch.manual_seed(12)
    tiles = Tiles.of(16, 16, 8)
    x, order = torch.randn(1, 4, 64, 24), torch.tensor([2, 0, 3, 1])
    a, b = (reselect(y, 128, tiles).merge(tiles.join(y)) for y in (x, x[:, order]))
    assert torch.allclose(a.view(1, 4, 32, 24)[:, order], b.view(1, 4, 32, 24), atol=1e-6)


@pytest.mark.parametrize("temperature", [1000.0, None])
@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_batch_is_its_images(grid, budget, temperature):
    x, together = made(grid, temperature, budget, b=4)
    merged = together.merge(x)
    back = together.unmerge(merged)
    for i in range(4):
        own = x[i : i + 1]
        picks = together.destinations.images(i, i + 1)
        alone = weigh(together.tiles.split(own), picks, together.tiles, temperature)
        for one in (alone, together.images(i, i + 1)):
            assert torch.equal(one.kept, together.kept[i : i + 1])
            assert torch.allclose(one.merge(own), merged[i : i + 1], atol=1e-5)
            assert torch.allclose(one.unmerge(merged[i : i + 1]), back[i : i + 1], atol=1e-5)
    swapped = Merge.cat([together.images(2, 4), together.images(0, 2)])
    assert torch.allclose(swapped.merge(x.roll(2, 0)), merged.roll(2, 0), atol=1e-6)
    assert torch.equal(swapped.assignment, together.assignment.roll(2, 0))


@pytest.mark.parametrize("temperature", [1000.0, 3.0, None])
@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", [(16, 16, 4, 0.85), (17, 13, 8, 0.5), (16, 16, 8, 0.0)])
def test_copies_are_taken_back_as_they_were(grid, temperature, budget):
    """However soft the weights: what other nodes make of copies reaches the rows that were copied."""
    _, merge = made(grid, temperature, budget)
    y = torch.randn(*merge.kept.shape, 5)
    whole = merge.copied(y)
    assert torch.equal(merge.take(whole), y)
    rows = merge.assignment.unsqueeze(-1).expand(-1, -1, 5)
    assert torch.equal(whole, y.gather(1, rows))
