"""Selection against the formulas: an exhaustive search and a plain slow greedy, both written here."""

from itertools import combinations

import pytest
import torch
from comfyui_toma.toma_core import selection
from comfyui_toma.toma_core.selection import _shares, keep_count, largest, select, similarity
from comfyui_toma.toma_core.tiles import Tiles
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

budgets = st.sampled_from(("equal", "adaptive"))


def cosines(features: Tensor) -> Tensor:
    x = torch.nn.functional.normalize(features.double(), dim=-1)
    return x @ x.mT


def value(features: Tensor, index: Tensor) -> Tensor:
    """f(D) of each tile: features [..., n, C], index [..., k] -> [...]"""
    s = cosines(features)
    return s.gather(-2, index.unsqueeze(-1).expand(*index.shape, s.shape[-1])).amax(-2).sum(-1)


def slow_greedy(features: Tensor, k: int) -> list[int]:
    """One tile [n, C], as the paper has it."""
    s = cosines(features)
    picked = [int(s.sum(1).argmax())]
    while len(picked) < k:
        best = s[picked].amax(0)
        gains = (s - best).relu().sum(1)
        gains[picked] = -1
        picked.append(int(gains.argmax()))
    return picked


def whole(n: int) -> Tiles:
    return Tiles.of(1, n, 0)


def image_values(features: Tensor, destinations, tiles: Tiles) -> Tensor:
    """f of each image by the used slots alone: [B]"""
    b, t, _, _ = features.shape
    values = torch.zeros(b, dtype=torch.float64)
    for i in range(b):
        for j in range(t):
            n = tiles.size if tiles.real is None else int(tiles.real[j].sum())
            used = slice(None) if destinations.used is None else destinations.used[i, j]
            values[i] += value(features[i, j, :n], destinations.index[i, j][used])
    return values


@pytest.mark.parametrize("positive", [True, False])
def test_greedy_against_exhaustive_search(positive):
    torch.manual_seed(1)
    x = torch.randn(60, 1, 9, 4)
    x = x.abs() if positive else x
    shares = []
    for k in (1, 2, 3, 4, 5):
        sets = [torch.tensor(d).expand(60, -1) for d in combinations(range(9), k)]
        best = torch.stack([value(x[:, 0], d) for d in sets]).amax(0)
        shares.append(value(x[:, 0], select(x, k, whole(9)).index[:, 0]) / best)
    shares = torch.stack(shares)
    assert shares.max() <= 1 + 1e-6
    assert shares.mean() > 0.95
    if positive:  # the bound is for an f that grows from 0
        assert shares.min() >= 1 - 1 / torch.e


@pytest.mark.parametrize("n, k", [(64, 32), (64, 5), (256, 128), (100, 99), (7, 3), (200, 150)])
def test_greedy_has_the_value_of_the_plain_one(n, k):
    torch.manual_seed(n + k)
    x = torch.randn(2, 1, n, 16) + torch.randn(2, 1, 1, 16)
    ours = value(x[:, 0], select(x, k, whole(n)).index[:, 0])
    theirs = torch.stack([value(tile, torch.tensor(slow_greedy(tile, k))) for tile in x[:, 0]])
    assert torch.allclose(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize("afresh", [1, 7, 128])
@pytest.mark.parametrize(
    "tiles, ratio", [(whole(64), 0.5), (whole(256), 0.4), (whole(7), 0.0), (Tiles.of(17, 13, 8), 0.5)]
)
def test_a_large_tile_is_picked_as_a_small_one(tiles, ratio, afresh, monkeypatch):
    torch.manual_seed(tiles.tokens)
    x = tiles.split(torch.randn(2, tiles.tokens, 16) + torch.randn(2, 1, 16))
    keep = keep_count(tiles.tokens, ratio)
    small, gains = select(x, keep, tiles), selection.greedy(similarity(x, tiles), 3)[1]
    monkeypatch.setattr(selection, "LARGE", 1)
    monkeypatch.setattr(selection, "AFRESH", afresh)
    large = select(x, keep, tiles)  # of two that gain the same, rounding decides
    assert torch.allclose(image_values(x, large, tiles), image_values(x, small, tiles), rtol=1e-5)
    assert torch.allclose(selection.greedy(similarity(x, tiles), 3)[1], gains, rtol=1e-4)


def test_a_large_image_is_looked_at_by_change(monkeypatch):
    """How much is read: the picks after the first improve ever fewer tokens."""
    torch.manual_seed(0)
    read, nonzero = [], Tensor.nonzero
    monkeypatch.setattr(Tensor, "nonzero", lambda x: read.append(int(x.sum())) or nonzero(x))
    n = selection.LARGE
    picks = select(torch.randn(1, 1, n, 8), n // 4, whole(n)).index.flatten()
    assert len(picks.unique()) == n // 4 == len(read)
    assert read[0] == n and sum(read) < 16 * n


@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.sampled_from((0, 2, 4, 8)),
    st.floats(0, 0.9),
    budgets,
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    st.integers(0, 9),
)
def test_picks_are_distinct_real_tokens_in_the_right_number(height, width, tile, ratio, budget, dtype, seed):
    torch.manual_seed(seed)
    tiles = Tiles.of(height, width, tile)
    wanted = keep_count(tiles.tokens, ratio)
    # few distinct values: many exact ties
    features = tiles.split(torch.randint(-1, 2, (2, tiles.tokens, 3)).to(dtype))
    first = select(features, wanted, tiles, budget)
    assert_distinct_real_tokens(first, wanted, tiles)
    assert_distinct_real_tokens(select(features, wanted, tiles, budget, last=first), wanted, tiles)


def assert_distinct_real_tokens(d, wanted: int, tiles: Tiles) -> None:
    assert d.keep == max(wanted, tiles.count)
    used = torch.ones_like(d.index, dtype=torch.bool) if d.used is None else d.used
    assert used.sum((1, 2)).tolist() == [d.keep] * 2
    assert used.any(-1).all(), "each tile keeps a token"
    order = tiles.order(torch.device("cpu")).view(tiles.count, tiles.size)
    for index, slots in zip(d.index, used, strict=True):
        picked = [order[t, i] for t in range(tiles.count) for i in index[t][slots[t]]]
        assert len({int(token) for token in picked}) == d.keep
        if tiles.real is not None:
            assert all(tiles.real[t][index[t][slots[t]]].all() for t in range(tiles.count)), "padding was picked"


def used_picks(d) -> list[list[set[int]]]:
    """Of each picture and tile."""
    used = torch.ones_like(d.index, dtype=torch.bool) if d.used is None else d.used
    return [[set(i[u].tolist()) for i, u in zip(*picture)] for picture in zip(d.index, used)]


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("tiles", [Tiles.of(16, 16, 4), Tiles.of(17, 13, 8)])
@pytest.mark.parametrize("large", [False, True])
def test_picks_rest_for_a_turn(tiles, budget, large, monkeypatch):
    """While others are left nothing is picked twice running; of the others, those that gain the most."""
    if large:
        monkeypatch.setattr(selection, "LARGE", 1)
    torch.manual_seed(3)
    x = tiles.split(torch.randn(2, tiles.tokens, 16) + torch.randn(2, 1, 16))
    last = None
    for _ in range(3):
        d = select(x, round(0.2 * tiles.tokens), tiles, budget, last=last)
        if last is not None:
            for before, after in zip(used_picks(last), used_picks(d)):
                assert not any(old & new for old, new in zip(before, after))
        last = d


def test_the_best_of_the_rested_are_picked():
    torch.manual_seed(4)
    x, n = torch.randn(1, 1, 64, 8), 64
    first = select(x, 16, whole(n))
    again = select(x, 16, whole(n), last=first).index[0, 0]
    rested = torch.tensor([i for i in range(n) if i not in first.index[0, 0].tolist()])
    s, picked = cosines(x[0, 0]), []
    for _ in range(16):
        best = s[picked].amax(0) if picked else torch.full((n,), -1.0).double()
        # what a token gains by standing for itself counts once more, as in `similarity`
        gains = (s - best).relu().sum(1) + 1
        gains[picked] = -1
        picked.append(int(rested[gains[rested].argmax()]))
    assert set(picked) == set(again.tolist())


@pytest.mark.parametrize("picks", [40, 80, 150])
def test_where_no_others_are_left_the_tired_are_picked_again(picks):
    """Also where the second half of the picks goes without the settled tokens, with gains that go on falling."""
    torch.manual_seed(5)
    x, tiles = torch.randn(2, 1, 200, 16), whole(200)
    first = select(x, 120, tiles)
    d = select(x, picks, tiles, last=first)
    for before, after in zip(used_picks(first), used_picks(d)):
        assert len(after[0] - before[0]) == min(picks, 80) and len(after[0] & before[0]) == max(0, picks - 80)
    similar = similarity(x, tiles)
    similar.diagonal(dim1=2, dim2=3).add_(selection._rested(first, tiles) * selection.RESTED)
    gains = selection.greedy(similar, picks)[1][:, 0]
    assert (gains > 0).all() and (gains.diff(dim=-1) < 1e-3)[:, 1:].all()


@pytest.mark.parametrize("side", [*range(8, 40), 48, 61, 64, 96, 97, 128, 131, 157, 160])
def test_the_share_that_stays_is_what_was_asked_for(side):
    for width in (side, 8, 64, 90, 160):
        for tile in (4, 8, 16, 0):
            for ratio in (0.1, 0.25, 0.3, 0.5, 0.75, 0.9):
                tiles = Tiles.of(side, width, tile)
                keep = max(keep_count(tiles.tokens, ratio), tiles.count)
                asked = (1 - ratio) * tiles.tokens
                assert abs(keep - asked) <= max(1, 0.02 * asked)
                shares, held = _shares(tiles, keep), torch.full((tiles.count,), tiles.size)
                if tiles.real is not None:
                    held = tiles.real.sum(-1)
                assert sum(shares) == keep and min(shares) >= 1
                assert (torch.tensor(shares) <= held).all() and max(shares) - min(shares) <= 2


def test_permuting_tiles_permutes_picks():
    torch.manual_seed(3)
    tiles, x = Tiles.of(16, 24, 8), torch.randn(1, 6, 64, 32)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    assert torch.equal(select(x[:, order], 96, tiles).index, select(x, 96, tiles).index[:, order])


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("height, width, keep", [(16, 16, 128), (17, 19, 100)])
def test_a_batch_is_its_images(height, width, keep, budget):
    torch.manual_seed(4)
    tiles = Tiles.of(height, width, 8)
    x = tiles.split(torch.randn(4, height * width, 32))
    together = select(x, keep, tiles, budget)
    for i in range(4):
        alone, part = select(x[i : i + 1], keep, tiles, budget), together.images(i, i + 1)
        values = [image_values(x[i : i + 1], d, tiles) for d in (alone, part)]
        assert torch.allclose(*values, rtol=1e-6)


def test_each_image_of_a_batch_has_its_own_picks():
    torch.manual_seed(5)
    index = select(torch.randn(2, 4, 64, 16), 128, Tiles.of(16, 16, 8)).index
    assert not torch.equal(index[0], index[1])


def test_value_never_falls_with_more_picks():
    torch.manual_seed(6)
    x = torch.randn(2, 1, 40, 8)
    values = torch.stack([value(x[:, 0], select(x, k, whole(40)).index[:, 0]) for k in range(1, 41)])
    assert (values.diff(dim=0) >= -1e-9).all()


@pytest.mark.parametrize("side, keep", [(16, 128), (17, 90), (24, 144)])
def test_adaptive_is_greedy_for_the_image(side, keep):
    """Against one greedy over all tiles, which may take up to twice the equal share in any of them."""
    torch.manual_seed(side)
    tiles = Tiles.of(side, side, 8)
    noise = torch.linspace(0, 2, tiles.tokens).view(1, -1, 1)  # tiles differ
    x = tiles.split(torch.randn(1, 1, 24) + noise * torch.randn(1, tiles.tokens, 24))
    d = select(x, keep, tiles, "adaptive")
    cap = d.index.shape[-1]
    assert cap == min(tiles.size, 2 * -(-keep // tiles.count))
    held = [
        tiles.size if tiles.real is None else int(r)
        for r in (tiles.real.sum(-1) if tiles.padded else range(tiles.count))
    ]
    orders = [slow_greedy(x[0, t, : held[t]], min(cap, held[t])) for t in range(tiles.count)]
    values = [
        [value(x[0, t, : held[t]], torch.tensor(o[: k + 1])) for k in range(len(o))] for t, o in enumerate(orders)
    ]
    gains = sorted((float(b - a) for v in values for a, b in zip(v, v[1:], strict=False)), reverse=True)
    best = sum(float(v[0]) for v in values) + sum(gains[: keep - tiles.count])
    assert float(image_values(x, d, tiles)) == pytest.approx(best, rel=1e-4)
    equal = image_values(x, select(x, keep, tiles, "equal"), tiles)
    assert image_values(x, d, tiles) > equal


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_largest_takes_exactly_the_largest(b, t, s, seed, ties):
    torch.manual_seed(seed)
    gains = torch.rand(b, t, s) * 10
    gains = gains.round() if ties else gains
    keep = t + seed % (t * s - t + 1)
    taken = largest(gains, keep)
    assert taken[..., 0].all()
    assert taken.sum((1, 2)).tolist() == [keep] * b
    for gain, take in zip(gains[..., 1:], taken[..., 1:], strict=True):
        if take.any() and not take.all():
            assert gain[take].min() >= gain[~take].max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_compared_in_full(dtype):
    torch.manual_seed(7)
    tiles, x = Tiles.of(16, 16, 8), torch.randn(2, 4, 64, 1300).to(dtype)
    assert torch.allclose(similarity(x, tiles), similarity(x.float(), tiles), atol=1e-5)
    assert similarity(x, tiles).dtype == torch.float32
    ours, full = (image_values(y.float(), select(y, 128, tiles), tiles) for y in (x, x.float()))
    assert torch.allclose(ours, full, rtol=1e-4)


EXTREMES = {
    "largest fp16": torch.full((1, 4, 64, 8), 65504.0).half(),
    "smallest fp16": torch.full((1, 4, 64, 8), 6e-8).half(),
    "mixed": (torch.randn(1, 4, 64, 8).sign() * torch.tensor([65504.0, 6e-8]).repeat(4)).half(),
    "zero": torch.zeros(1, 4, 64, 8).half(),
    "zero and not": torch.cat([torch.zeros(1, 4, 32, 8), torch.randn(1, 4, 32, 8)], 2).half(),
    "constant": torch.ones(1, 4, 64, 8),
    "large fp32": torch.randn(1, 4, 64, 8) * 1e15,
    "large bf16": torch.randn(1, 4, 64, 8).bfloat16() * 1e15,
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_neither_overflow_nor_repeat(name):
    tiles, x = Tiles.of(16, 16, 8), EXTREMES[name]
    assert similarity(x, tiles).isfinite().all()
    for budget in ("equal", "adaptive"):
        index = select(x, 128, tiles, budget).index
        assert all(len(set(tile.tolist())) == len(tile) for tile in index[0])


def test_zero_tokens_are_alike():
    x = EXTREMES["zero and not"][:, :1]
    s = similarity(x, whole(64))[0, 0]
    assert torch.allclose(s[:32, :32].fill_diagonal_(1), torch.ones(32, 32))
    assert s[:32, 32:].abs().max() < 1e-3


def test_unknown_budget():
    with pytest.raises(ValueError, match="fair"):
        select(torch.randn(1, 4, 64, 8), 128, Tiles.of(16, 16, 8), "fair")
