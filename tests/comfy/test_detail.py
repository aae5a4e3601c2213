"""What full steps have added, remembered and expected: by the formulas, step by step, and what chunks keep of it.

The checks are functions, so that test_mutations.py can show that each of them fails when the code is broken.
"""

from __future__ import annotations

import pytest
import torch
from test_by_hand import call_of, merge_of, settings_of


def factor(seen: torch.Tensor, real: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    """What seen has to be multiplied by to come nearest to real, summed over these sides."""
    return (seen * real).sum(over, keepdim=True) / seen.square().sum(over, keepdim=True)


@torch.inference_mode()
def check_carry(coarse: bool = False) -> None:
    """Full steps at 0, 3, 6, 9, a merged one after each, over a span of two blocks, with something added between
    (ControlNet): x + expected + U (trust * what the kept tokens changed beyond that), where `expected` is what the
    blocks added at the full step and what that drifts in a step (if coarse: of 2 x 2 tokens), as far as it was
    steady. Steady and trust are what would have been right before the last full step."""
    from comfyui_toma.toma_core.patcher.call import SOFTNESS, UNPROVEN, Kept, Place
    from comfyui_toma.toma_core.schedule import Action

    settings = settings_of(reselect_every=3)
    places = [Place("s", "s", 0, True, False), Place("s", "s", 1, False, True)]
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(16, 16, generator=generator) / 4 for _ in range(2))
    control, x0, trend = (torch.randn(2, 64, 16, generator=generator) for _ in range(3))
    trend[1] = 0  # the second picture has nothing but noise

    def x_at(step: int) -> torch.Tensor:
        return x0 + step / 6 * trend + torch.randn(2, 64, 16, generator=generator) / 16

    def block(weight):
        def run(tokens, merge):
            if merge is None:
                tokens += (tokens @ weight).tanh()  # in place, as Flux does
                return tokens
            # blocks that see a part of the tokens answer to that: here in half of the channels, by a lot
            return tokens + (tokens @ weight).tanh() + torch.arange(16).remainder(2) * tokens.roll(1, 1)

        return run

    def forward(action, kept, step, x):
        call = call_of(settings, action, kept, control=True, at=float(step))
        x = call.block(places[0], x.clone(), (8, 8), block(first))
        return call.block(places[1], x + control, (8, 8), block(second))

    def full_by_hand(x):
        middle = x + (x @ first).tanh() + control
        return middle + (middle @ second).tanh()

    def merged_by_hand(x, expected, picks_by, trust, last):
        kept_tokens, _, a = merge_of(picks_by, temperature=SOFTNESS, last=last)
        m = torch.nn.functional.one_hot(kept_tokens, 64).float()  # destinations stand for themselves, no means
        step = block(first)(m @ x, True) - m @ x
        tokens = m @ (x + a.mT @ step + control)
        beyond = step + block(second)(tokens, True) - tokens - m @ expected
        return m, beyond, x + control + expected + a.mT @ (trust * beyond)

    def of_cells(drift):
        means = drift.unflatten(1, (4, 2, 4, 2)).mean((2, 4), keepdim=True)
        return means.expand(-1, -1, 2, -1, 2, -1).flatten(1, 4) if coarse else drift

    name, kept, picks = "s 8x8", Kept(1, 0, 0, coarse=coarse), None
    added = drift = m = beyond = None
    steady, trust = torch.ones(2, 1, 1), torch.tensor(UNPROVEN)
    for turn in range(4):
        before, x = added, x_at(3 * turn)
        full = forward(Action.RESELECT, kept, 3 * turn, x)
        assert torch.allclose(full, full_by_hand(x), atol=1e-5), "not unmerged"
        added = kept.details[name].added  # to the last bit, since two tokens may gain the same
        assert torch.allclose(added, full - x - control, atol=1e-5)
        if turn > 0:
            real, share, went = m @ (added - before), 1 / 3, steady
            if turn > 2:
                steady = (0.5 + factor(m @ drift * 3, real, (1, 2))).clamp(0, 1)
            if turn > 1:
                real, share = real - went * (m @ drift) * 3, 1 / 3 * 4 / 6
            trust = factor(beyond, real * share, (1,)).clamp(0, 1)
            drift = of_cells((added - before) / 3)
        if turn == 1:
            assert trust[..., ::2].mean() > 2 * trust[..., 1::2].mean(), "channels that mislead are not told apart"
        x = x_at(3 * turn + 1)
        expected = added if drift is None else added + steady * drift
        m, beyond, wanted = merged_by_hand(x, expected, added, trust, picks)
        merged = forward(Action.REUSE, kept, 3 * turn + 1, x)
        assert (merged - wanted).norm() < 1e-3 * wanted.norm(), turn
        now = kept.details[name].merge.destinations
        for old, new in zip(now.index if picks is None else picks.index, now.index):
            assert picks is None or not set(old.flatten().tolist()) & set(new.flatten().tolist()), "no rest"
        picks, kept = now, Kept(1, 3 * turn, 3 * turn, before=kept.outline(), coarse=coarse)
    assert steady[0] > 0.8 > 0.4 > steady[1], f"noise is no drift: {steady.flatten()}"


@pytest.mark.parametrize("coarse", [False, True])
def test_detail_is_carried_by_the_formula(coarse):
    check_carry(coarse)


def test_expected_no_further_than_it_was_seen():
    """A sampler that goes back, or a cache that skips: the drift is not followed out of sight."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.patcher.detail import Detail
    from comfyui_toma.toma_core.tiles import Tiles

    added, drift, tiles = torch.zeros(1, 16, 4), torch.ones(1, 16, 4), Tiles.of(4, 4, 2)
    detail = Detail(reselect(tiles.split(added), 8, tiles), added, 6.0, drift, drift_from=4.0)
    for at, ahead in ((6.0, 0.0), (7.0, 0.5), (7.5, 0.75), (11.0, 1.0), (2.0, 0.0)):
        assert torch.equal(detail.expected(at), added + ahead * drift)


def even_change(full_steps, merged_at: float, **about):
    """A Detail at the last of the full steps, to which the blocks add the time at it, after one merged step which saw
    rightly what there was beyond the expected."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.patcher.detail import Detail, samples
    from comfyui_toma.toma_core.tiles import Tiles

    tiles, detail = Tiles.of(4, 4, 2), None
    tokens = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(0))
    for at in full_steps:
        before = detail and detail.outline(coarse=False)
        detail = Detail(reselect(tiles.split(tokens), 8, tiles), tokens * at**2, float(at))
        if before:
            detail.learn(before, coarse=False)
        if at == full_steps[-2]:
            seen = tokens * merged_at**2 - detail.expected(merged_at)
            detail.beyond, detail.merged_at = samples(detail.merge.take(seen)), merged_at
    return detail


def test_what_is_true_is_believed_and_no_line_is_mistaken_for_another():
    """Full steps at even distances, the merged ones between them right: wholly believed. Further off than the drift was
    seen, what is expected stays where it is, and nothing can be learnt by counting from a line that goes on."""
    assert torch.allclose(even_change([0, 3, 6, 9], 7.0).trust, torch.ones(1, 1, 4), atol=1e-4)
    assert even_change([2, 3, 6], 5.0).trust is None
    assert torch.allclose(even_change([2, 3, 6], 4.0).trust, torch.ones(1, 1, 4), atol=1e-4)


def test_full_steps_close_together_in_half_precision():
    """A drift of a hundredth of a step must neither overflow nor become no number."""
    from comfyui_toma.toma_core.patcher.call import Kept, Place
    from comfyui_toma.toma_core.schedule import Action

    settings, place = settings_of(reselect_every=2), Place("s", "s", 0, True, True)
    x = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0)).half()
    kept, out = Kept(1, 0, 0), None
    for at, factor, action in (
        (1.0, 1, Action.RESELECT), (1.005, 1, Action.REUSE), (1.01, 5000, Action.RESELECT),
        (1.01, 5000, Action.REUSE), (3.0, 5000, Action.REUSE),
    ):  # fmt: skip
        if action is Action.RESELECT and kept.details:
            kept = Kept(1, 1, 1, before=kept.outline())
        call = call_of(settings, action, kept, at=at)
        out = call.block(place, x.clone(), (8, 8), lambda tokens, _, f=factor: tokens * f)
        assert out.isfinite().all(), at
    assert kept.details["s 8x8"].drift is not None and out.abs().max() < 60000, "at most the same change again"


@pytest.mark.parametrize("grid", [(8, 8), (7, 5), (1, 9), (1, 1)])
def test_cells_of_any_grid(grid):
    from comfyui_toma.toma_core.patcher.detail import cells, grown
    from comfyui_toma.toma_core.tiles import Tiles

    tiles, count = Tiles.of(*grid, 8), grid[0] * grid[1]
    x = torch.randn(2, count, 3, generator=torch.Generator().manual_seed(0))
    small = cells(x, tiles)
    assert small.shape[1] <= max(1, round(count / 4)) and grown(small, tiles).shape == x.shape
    even = torch.ones_like(x) * 3
    assert torch.equal(grown(cells(even, tiles), tiles), even)
    assert grown(x, tiles) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_steady(dtype):
    from comfyui_toma.toma_core.patcher.detail import steadiness

    n0, n1, n2, line = torch.randn(4, 1, 200, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    cases = torch.cat([line, line, n1 - n0, line]), torch.cat([line, line * 0.25, n2 - n1, -line])
    steady = steadiness(*cases)
    assert steady.shape == (4, 1, 1)
    assert torch.allclose(steady.flatten().float(), torch.tensor([1.0, 0.75, 0.0, 0.0]), atol=0.05)
    odd = torch.full((1, 5, 2), torch.inf).to(dtype)
    for expected in (odd, odd * 0, torch.zeros_like(odd)):
        value = steadiness(expected, torch.ones_like(odd))
        assert value.isfinite().all() and 0 <= value <= 1


def check_gather(budget: str) -> None:
    """Chunks of two batches, put together in another order, each keep what is theirs."""
    from comfyui_toma.toma_core.merge import Merge, reselect
    from comfyui_toma.toma_core.patcher.detail import Detail, Kept
    from comfyui_toma.toma_core.tiles import Tiles

    tiles = Tiles.of(10, 11, 4)
    x = torch.randn(6, 110, 16, generator=torch.Generator().manual_seed(2))
    merges = [reselect(tiles.split(part), 40, tiles, budget=budget) for part in (x[:4], x[4:])]
    first, second = (
        Kept(
            chunks, *at, coarse=True, details={"m": Detail(
                merge, part, 1.5, -part, 0.75, steady=part[:, :1, :1], beyond=part[:, 5:], merged_at=2.0,
                trust=part[:, :1],
            )},
        )
        for chunks, at, merge, part in ((2, (5, 5), merges[0], x[:4]), (1, (3, 4), merges[1], x[4:]))
    )  # fmt: skip
    assert Kept.gather([(first, 0), (first, 1)]) is first
    both = Kept.gather([(second, 0), (first, 1), (first, 0)])
    order = [4, 5, 2, 3, 0, 1]
    assert (both.chunks, both.selected_at, both.weighed_at) == (3, 3, 4)
    assert both.coarse, "which is of the model, and the same for all"
    got = both.details["m"]
    assert (got.full_at, got.drift_from, got.merged_at) == (1.5, 0.75, 2.0)
    wanted = {"added": x, "drift": -x, "steady": x[:, :1, :1], "beyond": x[:, 5:], "trust": x[:, :1]}
    for name, values in wanted.items():
        assert torch.equal(getattr(got, name), values[order]), name
    alone: list[Merge] = [merges[i // 4].images(i % 4, i % 4 + 1) for i in order]
    assert torch.allclose(got.merge.merge(x[order]), torch.cat([m.merge(x[i : i + 1]) for m, i in zip(alone, order)]))
    rows = got.merge.take(x[order])
    back = torch.cat([m.unmerge(row[None]) for m, row in zip(alone, rows)])
    assert torch.allclose(got.merge.unmerge(rows), back)
    outlines = Kept.gather([(second.outline(), 0), (first.outline(), 1)]).details["m"]
    of_both = Kept.gather([(second, 0), (first, 1)]).outline().details["m"]
    for name in ("added", "sampled", "drift", "rows", "trust", "beyond"):
        assert torch.equal(getattr(outlines, name), getattr(of_both, name)), name
    assert torch.equal(outlines.destinations.index, of_both.destinations.index)


@pytest.mark.parametrize(
    "other,lost",
    [
        ({"merged_at": 1.75}, {"merged_at", "beyond"}),
        ({"drift_from": 1.0}, {"drift_from", "drift", "beyond"}),
        ({"full_at": 2.0}, {"full_at", "drift_from", "drift", "beyond"}),
        ({"drift_from": None, "drift": None}, {"drift_from", "drift", "beyond"}),
        ({"trust": None}, {"trust"}),
    ],
)
@pytest.mark.parametrize("outlined", [False, True])
def test_what_was_counted_from_other_times_is_not_put_together(other, lost, outlined):
    """And a full step that follows learns nothing wrong from it."""
    from comfyui_toma.toma_core.patcher.detail import Detail, Kept

    parts = [Kept(1, 0, 0, {"m": even_change([0, 3, 6, 9], 7.0)}) for _ in range(2)]
    for part in parts:
        detail = part.details["m"]
        detail.beyond, detail.merged_at = detail.merge.take(detail.added), 9.5
    for name, value in other.items():
        setattr(parts[1].details["m"], name, value)
    parts = [part.outline() for part in parts] if outlined else parts
    got = Kept.gather([(part, 0) for part in parts]).details["m"]
    assert {name for name, value in vars(got).items() if value is None} == lost
    assert torch.equal(got.added, torch.cat([part.details["m"].added for part in parts]))
    later = Detail(even_change([0, 3], 1.0).merge, torch.ones(2, 16, 4), 12.0)
    later.learn(got if outlined else Kept(2, 0, 0, {"m": got}).outline().details["m"], coarse=False)
    assert (later.drift is None) == ("full_at" in lost), "how it changed is not known"


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
def test_chunks_are_put_together_in_order(budget):
    check_gather(budget)


@pytest.fixture
def run_with_two(models):
    """A run of 6 steps that chooses at 0 and 3, after step 3, and the tokens of its two prompts: prompt 1 chose at step
    3, prompt 0 did not (it ran out of memory there)."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.patcher.detail import Detail, Kept
    from comfyui_toma.toma_core.patcher.flux import FluxFamily
    from comfyui_toma.toma_core.patcher.run import Run
    from comfyui_toma.toma_core.tiles import Tiles

    settings, tiles = settings_of(reselect_every=3), Tiles.of(40, 40, 8)
    run = Run(settings, FluxFamily(models["flux"], settings))
    run.table = settings.schedule.table(6)
    run.report.at_step = dict.fromkeys(range(4), "")
    x = torch.randn(2, 1600, 8, generator=torch.Generator().manual_seed(2))
    for i, at in enumerate((0, 3)):
        part = x[i : i + 1]
        merge = reselect(tiles.split(part), 800, tiles)
        run.kept[i] = (Kept(1, at, at, {"m": Detail(merge, part, float(at), 2 * part, at - 1.0)}), 0)
    return run, x


def test_a_prompt_that_missed_its_turn_takes_it_with_the_others(run_with_two):
    from comfyui_toma.toma_core.schedule import Action

    run, x = run_with_two
    call = run._call([0, 1], 4)
    before = call.kept.before.details["m"]
    assert call.action is Action.RESELECT and call.full and torch.equal(before.added, x)
    assert torch.equal(x.gather(1, before.rows[..., None].expand(-1, -1, 8)), before.sampled)
    assert before.drift is None and before.full_at is None, "their full steps were not the same"
    late = run.kept[0][0].details["m"]
    assert torch.equal(late.drift, 2 * late.sampled)
    assert 200 < before.sampled.shape[1] < 300, "samples"
    assert before.destinations.index.shape[0] == 2
    assert run._call([1], 4).action is Action.REUSE, "alone it needs not choose again"


def test_an_outline_is_never_merged_by(run_with_two):
    """Also where the sampler goes back to an earlier step, at which its turn was not over."""
    from comfyui_toma.toma_core.schedule import Action

    run, _ = run_with_two
    run._call([1], 4)
    assert run.kept[0][0].outlined
    run.report.at_step = dict.fromkeys(range(2), "")
    assert run._call([0], 2).action is Action.RESELECT
    assert run._call([1], 2).action is Action.REUSE


def test_without_memory_for_an_outline_there_is_none(run_with_two, monkeypatch):
    from comfyui_toma.toma_core.patcher import detail
    from comfyui_toma.toma_core.schedule import Action

    def full(rows):
        raise torch.OutOfMemoryError("no memory")

    run, _ = run_with_two
    monkeypatch.setattr(detail, "samples", full)
    assert run._call([0], 4).action is Action.RESELECT and 0 not in run.kept
    assert run._call([1], 4).action is Action.REUSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_believed_of_a_change(dtype):
    """The factor from 0 to 1 that comes nearest to what was real, for each picture and channel by itself."""
    from comfyui_toma.toma_core.patcher.detail import believable

    seen = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(4)).to(dtype)
    noise = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(5)).to(dtype)
    real = torch.stack((seen[0] * torch.tensor([2.0, 1.0, -1.0, 9.0]).to(dtype), noise[1]))
    trust = believable(seen, real, 0.5)
    assert trust.shape == (2, 1, 4)
    assert torch.allclose(trust[0, 0].float(), torch.tensor([1.0, 0.5, 0.0, 1.0]), atol=1e-2)
    assert (trust[1] < 0.25).all(), "noise is hardly believed"
    line = torch.linspace(0, 1, 101)
    for c in range(4):
        off = [(f * seen[1, :, c].float() - 0.5 * real[1, :, c].float()).norm() for f in line]
        assert abs(line[torch.stack(off).argmin()] - trust[1, 0, c].float()) < 0.02
    most = torch.finfo(dtype).max
    for odd in (torch.zeros_like(seen), torch.full_like(seen, most), seen * torch.inf, seen * torch.nan):
        for other in (real, odd):
            trust = believable(odd, other, 0.5)
            assert trust.isfinite().all() and (trust >= 0).all() and (trust <= 1).all()
