"""The rules of the hot path, by what torch really dispatches: see CONTRIBUTING.md."""

import json
from collections import Counter
from functools import partial

import inductor
import pytest
import torch
from comfyui_toma.toma_core.chunks import ChunkState
from comfyui_toma.toma_core.clean import grid_of, latent_of, tokens_of, unmerged
from comfyui_toma.toma_core.evaluation import Block, Evaluation
from comfyui_toma.toma_core.forecast import Forecast
from comfyui_toma.toma_core.merge import Merge, reselect, weigh
from comfyui_toma.toma_core.plan import Action
from comfyui_toma.toma_core.selection import keep_count, select, similarity
from comfyui_toma.toma_core.settings import Settings
from comfyui_toma.toma_core.tiles import Tiles
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN, PADDED, UNEVEN = (16, 16, 8, 0.5), (17, 13, 8, 0.5), (16, 16, 8, 0.3)

RESHAPES = {
    "view",
    "_unsafe_view",
    "reshape",
    "permute",
    "transpose",
    "expand",
    "unsqueeze",
    "squeeze",
    "clone",
    "alias",
}
REUSE = RESHAPES | {"bmm"}
# elementwise, reductions and reads by index: nothing that waits for the host, orders or scatters
WEIGH = REUSE | {
    "arange",
    "gather",
    "take",
    "index_select",
    "add",
    "mul",
    "div",
    "sum",
    "softmax",
    "clamp_min",
    "argmax",
}
WEIGH |= {
    "eq",
    "masked_fill",
    "bitwise_not",
    "rsqrt",
    "nan_to_num",
    "diagonal",
    "fill",
    "_to_copy",
    "baddbmm",
    "new_zeros",
    "split",
    "ones_like",
}
RESELECT = WEIGH | {
    "max",
    "clamp",
    "cat",
    "slice",
    "select",
    "zeros_like",
    "sub",
    "cumsum",
    "searchsorted",
    "lt",
}
ADAPTIVE = RESELECT | {"__lshift__", "ge", "gt", "bitwise_and", "bitwise_or", "le", "rsub", "new_zeros"}
ALSO = {"detach", "lift_fresh", "diff"}


class Recorder(TorchDispatchMode):
    """Counts the operations by name, without overload, in-place mark and leading underscore of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.ops[{"_softmax": "softmax"}.get(name, name if name.endswith("__") else name.rstrip("_"))] += 1
        return func(*args, **(kwargs or {}))


def recorded(function) -> Counter[str]:
    function()  # static tables are made once
    with Recorder() as recorder:
        function()
    return recorder.ops


def setting(grid=PLAIN, batch=2, dtype=torch.float32, channels=24):
    height, width, tile, ratio = grid
    tiles = Tiles.of(height, width, tile)
    return tiles, torch.randn(batch, tiles.tokens, channels).to(dtype), keep_count(tiles.tokens, ratio)


def test_the_recorder_sees_what_is_forbidden():
    ops = recorded(lambda: [torch.rand(9).sort(), torch.rand(9).nonzero(), torch.rand(1).item(), torch.rand(9).topk(2)])
    assert {"sort", "nonzero", "_local_scalar_dense", "topk"} <= set(ops)
    assert not {"sort", "topk", "nonzero", "_local_scalar_dense", "scatter", "index_put", "index"} & (ADAPTIVE | ALSO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_reused_step_is_two_products_and_reshapes(dtype):
    tiles, x, keep = setting(dtype=dtype)
    merge = reselect(tiles.split(x), keep, tiles)
    ops = recorded(lambda: merge.unmerge(merge.merge(x)))
    assert ops["bmm"] == 2 and set(ops) <= REUSE, ops
    ops = recorded(lambda: merge.residual(x, merge.merge(x)))
    assert ops["bmm"] == 2 and ops["add"] == 1 and set(ops) <= REUSE | {"add"}, ops
    assert ops["clone"] == 1, "tokens are copied into tiles, and not back"


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("grid", [PADDED, UNEVEN])
def test_other_grids_and_budgets_add_only_reads_of_rows(grid, budget):
    tiles, x, keep = setting(grid)
    merge = reselect(tiles.split(x), keep, tiles, budget=budget)
    ops = recorded(lambda: merge.residual(x, merge.merge(x)))
    assert ops["bmm"] == 2 and ops["index_select"] <= 4 and set(ops) <= REUSE | {"index_select", "add"}, ops


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("grid", [PLAIN, PADDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_is_two_products_or_reads_of_rows(grid, dtype, copies):
    """Three blocks that kept tokens ride through, in a step that reuses: the blocks' own work is not counted."""
    (height, width, tile, ratio), (_, x, _) = grid, setting(grid, dtype=dtype)
    settings = Settings(ratio=ratio, tile_size=tile)
    row = [Block("row", "row", i, last=i == 2) for i in range(3)]
    kept = ChunkState(1)

    def step(action: Action = Action.REUSE) -> None:
        evaluation, tokens = Evaluation(settings, action, kept, in_x0=copies), x
        for block in row:
            tokens, _ = evaluation.enter(block, tokens, (height, width))
            tokens = evaluation.leave(block, tokens)

    step(Action.RESELECT)
    ops = recorded(step)
    assert ops["bmm"] == (0 if copies else 2) and ops["index_select"] <= 4, ops
    assert set(ops) <= REUSE | {"add", "sub", "clamp", "index_select"}, ops


@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (1, 4, 31, 17), (1, 4, 3, 8, 8)])
def test_unmerging_clean_estimates_is_reads_and_one_product(shape):
    patch = (1, 2, 2)
    last, now = torch.randn(2, *shape)
    tiles = Tiles.of(*grid_of(shape, patch), 8)
    merge = reselect(tiles.split(tokens_of(last, patch)), tiles.tokens // 2, tiles)
    before = tokens_of(last, patch)
    ops = recorded(lambda: latent_of(unmerged(tokens_of(now, patch), before, merge), now, patch))
    padded = {"replication_pad2d", "replication_pad3d"}
    assert ops["bmm"] == 1 and set(ops) <= REUSE | {"add", "sub", "index_select", "slice", *padded}, ops


def test_a_forecast_and_its_grade_wait_for_nothing():
    """Whatever a step does with answers, what it found out stays on the device."""
    forecast = Forecast()
    answers = iter(torch.randn(12, 2, 4, 8, 8))

    def steps() -> None:
        for place in (0.0, 0.1, 0.2):
            forecast.observe(place, next(answers))
        forecast.give(0.3, 0.1)
        forecast.corrected(0.4, 0.1, next(answers))

    ops = recorded(steps)
    wanted = {"lerp", "sub", "add", "mul", "clone", "detach", "linalg_vector_norm", "clamp_min", "div", "alias"}
    learning = {"pow", "full", "clamp", "nan_to_num", "stack"}
    assert set(ops) <= wanted | learning | {"select", "unbind"}, ops


def test_rows_of_a_part_of_the_sequence_are_read_where_they_are():
    """Flux's single blocks have text and picture in one sequence: taking rows must not copy the whole picture."""
    tiles, x, keep = setting(batch=2)
    merge = reselect(tiles.split(x), keep, tiles)
    sequence = torch.cat((torch.zeros_like(x[:, :7]), x), 1)
    assert torch.equal(merge.take(sequence[:, 7:]), merge.take(x))
    ops = recorded(lambda: merge.take(sequence[:, 7:]))
    assert not ops["clone"] and ops["index_select"] == 2, ops


@pytest.mark.parametrize("temperature", [1000.0, None])
@pytest.mark.parametrize("grid", [PLAIN, PADDED, UNEVEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reweigh_and_reselect_neither_sync_nor_sort_nor_scatter(grid, temperature, dtype):
    tiles, x, keep = setting(grid, dtype=dtype)
    features = tiles.split(x)
    destinations = select(features, keep, tiles)
    assert set(recorded(lambda: weigh(features, destinations, tiles, temperature))) <= WEIGH | ALSO
    assert set(recorded(lambda: reselect(features, keep, tiles, temperature))) <= RESELECT | ALSO
    assert set(recorded(lambda: reselect(features, keep, tiles, temperature, "adaptive"))) <= ADAPTIVE | ALSO
    again = partial(reselect, features, keep, tiles, temperature, last=destinations)
    assert set(recorded(again)) <= ADAPTIVE | ALSO | {"any"}


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
def test_operations_grow_with_picks_and_not_with_tiles_or_batch(budget):
    def count(side, batch, keep):
        tiles, x, _ = setting((side, side, 8, 0), batch)
        features = tiles.split(x)
        return recorded(lambda: reselect(features, keep * tiles.count, tiles, budget=budget)).total()

    few = count(16, 2, 8)
    assert count(64, 2, 8) == count(16, 4, 8) == few
    a_pick = (count(16, 2, 12) - few) / 4
    assert 0 < a_pick <= (8 if budget == "equal" else 16)
    assert count(16, 2, 16) == few + 8 * a_pick


@pytest.mark.parametrize("batch", [1, 2])
def test_nothing_depends_on_values(batch):
    """The same operations in the same number whatever the tokens are."""
    tiles, x, keep = setting(PADDED, batch)
    for budget in ("equal", "adaptive"):
        tokens = [tiles.split(y) for y in (x, x * 0, x.sign())]
        ops = [recorded(partial(reselect, y, keep, tiles, budget=budget)) for y in tokens]
        assert ops[0] == ops[1] == ops[2]


# ------------------------------------------------------------------------- compiled

NO_INDUCTOR = inductor.why_not()
SLOW_INDUCTOR = (pytest.mark.slow, pytest.mark.skipif(bool(NO_INDUCTOR), reason=NO_INDUCTOR))  # minutes of C++


def compiled(function, backend="aot_eager" if NO_INDUCTOR else "inductor"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def twice(fast, slow, *inputs):
    """The results of the second call, which must not compile again."""
    fast(*inputs[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        return fast(*inputs[1]), slow(*inputs[1])


@pytest.mark.parametrize("grid", [PLAIN, PADDED])
def test_reused_step_compiles_once(grid):
    tiles, x, keep = setting(grid)
    merges = [reselect(tiles.split(y), keep, tiles) for y in (x, x.roll(1, 1))]

    def step(merge: Merge, x):
        merged = merge.merge(x)
        return merge.residual(x, merged * 0.5)

    fast, slow = twice(compiled(step), step, (merges[0], x), (merges[1], x + 1))
    assert torch.allclose(fast, slow, atol=1e-5)


@pytest.mark.parametrize(
    "grid, budget, backend",
    [
        pytest.param((8, 12, 4, 0.875), "equal", "inductor", marks=SLOW_INDUCTOR),
        ((8, 12, 4, 0.875), "equal", "aot_eager"),
        ((9, 7, 4, 0.5), "equal", "aot_eager"),
        ((9, 7, 4, 0.5), "adaptive", "aot_eager"),
    ],
)
def test_reselect_compiles_once(grid, budget, backend):
    tiles, x, keep = setting(grid)

    def step(x):
        features = tiles.split(x)
        merge = reselect(features, keep, tiles, budget=budget)
        destinations = merge.destinations
        rows = destinations.index.unsqueeze(-1).expand(-1, -1, -1, tiles.size)
        nearest = similarity(features, tiles).gather(2, rows)
        if destinations.used is not None:
            nearest = nearest.masked_fill(~destinations.used.unsqueeze(-1), -2.0)
        return destinations, nearest.amax(2).sum((1, 2)), merge.merge(x)

    (picks, value, merged), (_, slow_value, _) = twice(compiled(step, backend), step, (x,), (x.flip(1),))
    assert torch.allclose(value, slow_value, rtol=1e-5), "near ties may be picked otherwise, of equal worth"
    slow = weigh(tiles.split(x.flip(1)), picks, tiles).merge(x.flip(1))
    assert torch.allclose(merged, slow, atol=1e-4)


# --------------------------------------------------------------------------- memory


def peak_memory(function, folder) -> int:
    """Bytes that the allocator gave out beyond what it had, at most, by torch's own account."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((e["ts"], e["args"]) for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0)
    start = memory[0][1]["Total Allocated"] - memory[0][1]["Bytes"]
    return max(args["Total Allocated"] for _, args in memory) - start


def test_the_account_of_memory_is_right(tmp_path):
    def allocate():
        a = torch.empty(1 << 20)
        del a
        return torch.empty(2 << 20), torch.empty(1 << 20)

    assert 12 << 20 <= peak_memory(allocate, tmp_path) < 13 << 20


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
@pytest.mark.parametrize("channels, dtype", [(640, torch.float32), (3072, torch.bfloat16)], ids=["sdxl", "flux"])
def test_a_selection_needs_less_than_64_mib(channels, dtype, budget, tmp_path):
    """64x64 tokens, tile 8, batch 2; the features in tiles are the caller's."""
    tiles, x, keep = setting((64, 64, 8, 0.5), 2, dtype, channels)
    features = tiles.split(x)
    select(features, keep, tiles, budget)
    assert 1 << 20 < peak_memory(lambda: select(features, keep, tiles, budget), tmp_path) < 64 << 20
