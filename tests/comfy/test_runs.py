"""Runs keep to themselves: prompts apart, sizes apart, nothing left behind, the same again on repeat."""

from __future__ import annotations

import gc

import builders
import pytest
import torch
from told import report

SIZE = {"width": 128, "height": 128, "steps": 5, "cfg": 3.0}


class OneByOne:
    """Makes ComfyUI evaluate prompts in separate calls, as it does when memory is short: always, or at every
    other call. Done through the model's own estimate of the memory it needs."""

    def __init__(self, monkeypatch, model, every: int = 1):
        self.calls = 0
        needed = model.model.memory_required

        def memory_required(input_shape, **kwargs):
            self.calls += 1
            short = input_shape[0] > 1 and (self.calls // 3) % every == 0
            return float("inf") if short else needed(input_shape, **kwargs)

        monkeypatch.setattr(model.model, "memory_required", memory_required)


def check_prompts_apart(models, merged, monkeypatch, name: str, every: int = 1, **settings) -> None:
    """In one batch, one by one, or changing: the same picture.

    Rounding differs with the batch and turns near ties between two tokens, on each processor others, so the yardstick
    is what merging itself costs: that was up to 0.36 of it, picks of the wrong prompt 0.7 and more."""
    patched = merged(models[name], **settings)
    together = builders.sample(patched, **SIZE)
    cost = (together - builders.sample(models[name], **SIZE)).norm()
    with monkeypatch.context() as patch:
        OneByOne(patch, models[name], every)
        apart = builders.sample(patched, **SIZE)
    assert (together - apart).norm() < 0.5 * cost
    assert report(patched).blocks_merged == report(patched).blocks


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_prompts_are_kept_apart(models, merged, monkeypatch, name, every):
    check_prompts_apart(models, merged, monkeypatch, name, every)


def test_prompts_are_kept_apart_when_weights_are_renewed(models, merged, monkeypatch):
    settings = {"merge": "each layer", "reselect_every": 4, "reweight_every": 2, "budget": "adaptive"}
    check_prompts_apart(models, merged, monkeypatch, "sdxl", 2, **settings)


def check_pictures_apart(models, name: str) -> None:
    """Each picture of a batch has its own picks: those that it has alone, but for near ties that rounding turns."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    patched = patch(models[name], Settings(ratio=0.5, skip_first_blocks=0, reselect_every=3), record=True)
    noise = torch.randn(builders.empty_latent(models[name], batch=2).shape, generator=torch.Generator().manual_seed(2))

    def picks(latent: torch.Tensor) -> list[torch.Tensor]:
        builders.sample(patched, latent=latent, **{**SIZE, "steps": 2})
        picks = report(patched).picks
        return [pick.kept for pick in picks if pick.step == picks[0].step]

    def shared(a: torch.Tensor, b: torch.Tensor) -> float:
        return len(set(a.tolist()) & set(b.tolist())) / len(a)

    # the sampler's noise is drawn for the whole batch: only the first picture gets the same alone
    for both, alone in zip(picks(noise), picks(noise[:1])):
        assert shared(both[0], alone[0]) > 0.85
        assert shared(both[1], both[0]) < 0.85


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_pictures_of_a_batch_are_kept_apart(models, name):
    check_pictures_apart(models, name)


def check_second_pass(models, merged, name: str) -> None:
    """A hi-res pass after a small one, with the same patched model, is what it is alone."""
    patched = merged(models[name])
    large = {**SIZE, "width": 192, "height": 160, "denoise": 0.6}
    alone = builders.sample(patched, **large)
    small = builders.sample(patched, **SIZE)
    after = builders.sample(patched, **large)
    assert torch.equal(alone, after)
    assert torch.equal(small, builders.sample(patched, **SIZE))


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_a_second_pass_of_another_size_starts_anew(models, merged, name):
    check_second_pass(models, merged, name)


def check_deep_shrink(models, merged) -> None:
    """PatchModelAddDownscale changes the token grid within one run: both grids are merged, each by itself."""
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale

    def shrunk(model):
        make = PatchModelAddDownscale
        args = (model, 3, 2.0, 0.0, 0.4, True, "bicubic", "bicubic")
        if hasattr(make, "execute") and not hasattr(make, "patch"):
            return make.execute(*args).args[0]
        return make().patch(*args)[0]

    run = {**SIZE, "steps": 6}
    before = builders.sample(shrunk(models["sdxl"]), **run)
    patched = shrunk(merged(models["sdxl"], reselect_every=4))
    out = builders.sample(patched, **run)
    told = report(patched)
    assert torch.isfinite(out).all()
    assert (out - before).norm() < before.norm()
    assert {n for n, _ in told.tokens.values()} >= {64, 16}, told.tokens
    assert not told.notes


def test_a_grid_that_changes_within_the_run(models, merged):
    check_deep_shrink(models, merged)


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["flux", "sdxl"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_run_that_was_stopped_does_not_show_in_the_next(models, merged, name, at):
    patched = merged(models[name])
    fresh = builders.sample(patched, **SIZE)

    def stop(step, *_):
        if step == at:
            raise Stop

    with pytest.raises(Stop):
        builders.sample(patched, **{**SIZE, "seed": 5}, callback=stop)
    assert not report(patched).finished
    assert "ended early" in report(patched).sentence()
    assert torch.equal(fresh, builders.sample(patched, **SIZE))
    assert report(patched).finished


def ours_alive() -> list[str]:
    from comfyui_toma.toma_core.chunks import ChunkState
    from comfyui_toma.toma_core.evaluation import Evaluation
    from comfyui_toma.toma_core.forecast import Anchor
    from comfyui_toma.toma_core.merge import Merge
    from comfyui_toma.toma_core.patcher.merging import Merging
    from comfyui_toma.toma_core.patcher.run import Run

    gc.collect()
    kinds = (Merge, ChunkState, Evaluation, Merging, Run, Anchor)
    return [type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds)]


def in_windows(model, turns):
    """The pictures of a batch as frames that are shown one by one, the way AnimateDiff-Evolved goes about it and says
    so: at the nth step in the order turns(n), each frame under the name that it has there."""
    steps = iter(range(10**6))

    def windows(apply_model, arguments):
        x, out = arguments["input"], [None] * len(arguments["input"])
        for frame, name in turns(next(steps)):
            c = {key: value[frame : frame + 1] for key, value in arguments["c"].items() if torch.is_tensor(value)}
            c["transformer_options"] = arguments["c"]["transformer_options"] | {"ad_params": {"sub_idxs": [name]}}
            one = slice(frame, frame + 1)
            out[frame] = apply_model(x[one], arguments["timestep"][one], **c)
        return torch.cat(out)

    model = model.clone()
    model.set_model_unet_function_wrapper(windows)
    return model


FRAMES = {**SIZE, "cfg": 1.0, "batch": 2, "steps": 6}


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_frames_shown_in_another_order_keep_their_own(models, merged, name):
    """At each second step the windows come in the other order."""
    in_turn = in_windows(models[name], lambda n: [(0, 0), (1, 1)])
    changing = in_windows(models[name], lambda n: [(0, 0), (1, 1)][:: -1 if n % 2 else 1])
    patched = merged(changing)
    assert torch.equal(builders.sample(merged(in_turn), **FRAMES), builders.sample(patched, **FRAMES))
    assert report(patched).tokens


def test_windows_that_slide_on_do_not_pile_up(models, merged):
    """None is ever seen again: what they left is dropped a few steps later."""
    from comfyui_toma.toma_core.chunks import ChunkState

    patched = merged(in_windows(models["flux"], lambda n: [(0, 2 * n), (1, 2 * n + 1)]), reselect_every=2)
    alive: list[int] = []
    gc.collect()

    def count(*_):
        alive.append(sum(type(o) is ChunkState for o in gc.get_objects()))

    builders.sample(patched, **{**FRAMES, "steps": 12}, callback=count)
    assert len(alive) == 12 and max(alive[8:]) <= max(alive[4:8]), alive
    assert max(alive) <= 16, alive


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_nothing_is_left_behind(models, merged, name):
    """After a run all it kept is freed, and the shared model is as it was."""
    model = models[name]
    before = builders.sample(model, **SIZE)
    modules = {path: dict(m.__dict__) for path, m in model.model.named_modules()}
    options = repr(model.model_options)
    patched = merged(model, tolerance=0.3)
    builders.sample(patched, **SIZE)
    assert not ours_alive()
    assert torch.equal(before, builders.sample(model, **SIZE))
    assert repr(model.model_options) == options
    for path, module in model.model.named_modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.__self__ is module, path  # ComfyUI puts the bound method back
        assert set(module.__dict__) - {"forward"} == set(modules[path]) - {"forward"}, path


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_ratio_zero_changes_nothing_and_is_still_timed(models, merged, name):
    patched = merged(models[name], ratio=0.0)
    assert torch.equal(builders.sample(models[name], **SIZE), builders.sample(patched, **SIZE))
    told = report(patched)
    assert told.seconds > 0 and told.steps == SIZE["steps"]
    assert told.kinds == ["full"] * SIZE["steps"] and told.work_speedup == 1.0


def test_statistics_count_what_was_done(models, merged):
    patched = merged(models["sdxl"], ratio=0.5, end_percent=0.8)
    builders.sample(patched, **{**SIZE, "steps": 10})
    told = report(patched)
    assert told.kinds == ["merged"] * 8 + ["full"] * 2
    assert told.counts == {"full": 2, "merged": 8, "forecast": 0}
    assert told.tokens == {"8x8": (64, 32), "4x4": (16, 8)}
    assert told.attention == "attention: pytorch"
    works = {e.kind: e.work for e in told.evaluations}
    assert works["full"] == 1.0 > works["merged"] > 0.3
    assert told.work_speedup == pytest.approx(10 / (2 + 8 * works["merged"]))
    line = told.sentence()
    for part in ("unet", "28 of 28", "8x8 64 -> 32", "2 full", "8 merged", "x by work done", "attention: pytorch"):
        assert part in line


def test_statistics_as_data(models, merged):
    """What other nodes and the page get: plain JSON, also of numbers that are none."""
    import json

    patched = merged(models["flux"], ratio=0.5, tolerance=0.3)
    builders.sample(patched, **{**SIZE, "steps": 8})
    told = report(patched)
    told.evaluations[0].error = float("inf")
    data = json.loads(json.dumps(told.as_json(), allow_nan=False))
    assert data["counts"] == told.counts and len(data["evaluations"]) == 8 == data["steps"]
    assert {e["kind"] for e in data["evaluations"]} <= {"full", "merged", "forecast"}
    assert data["settings"]["tolerance"] == 0.3 and data["settings"]["merge"] == "whole block" and data["finished"]


def test_of_two_nodes_in_a_row_the_last_counts(models, merged):
    model = models["sdxl"]
    once = builders.sample(merged(model, ratio=0.5), **SIZE)
    twice = merged(merged(model, ratio=0.75, tile_size=4), ratio=0.5)
    assert torch.equal(once, builders.sample(twice, **SIZE))


def by_hand(kinds: str):
    """A plan of these kinds of steps: F full, M merged, S forecast."""
    from comfyui_toma.toma_core.plan import Decision, Kind

    class ByHand:
        def next(self, moment, places):
            return Decision({"F": Kind.FULL, "M": Kind.MERGED, "S": Kind.FORECAST}[kinds[moment.step]], "by hand")

        def learn(self, *_):
            return None

        def restart(self):
            pass

    return ByHand


def test_what_prompts_keep_outlasts_forecasts(models, monkeypatch):
    """Prompts that run one by one: the first to come after many forecast steps must not drop what the other keeps."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    kinds = "FFSSSSSSSSMF"
    OneByOne(monkeypatch, models["flux"])
    settings = Settings(reselect_every=1, reweight_every=1, tolerance=0.3)
    patched = patch(models["flux"], settings, plan=by_hand(kinds), record=True)
    builders.sample(patched, **{**SIZE, "steps": len(kinds)})
    together = patch(models["flux"], settings, plan=by_hand(kinds))
    monkeypatch.undo()
    builders.sample(together, **{**SIZE, "steps": len(kinds)})
    work = [next(e.work for e in report(p).evaluations if e.kind == "merged") for p in (patched, together)]
    assert work[0] == pytest.approx(work[1]) and work[0] < 0.9


def test_a_full_step_between_leaves_the_turns_alone(models, turns):
    """On a DiT too: destinations that were selected before a full step are reused after it."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    settings = Settings(reselect_every=4, reweight_every=2, tolerance=0.3)
    builders.sample(patch(models["flux"], settings, plan=by_hand("FMFMMF")), **{**SIZE, "cfg": 1.0, "steps": 6})
    assert turns == ["reselect", "reuse", "reweight"]


@pytest.fixture
def turns(monkeypatch) -> list[str]:
    """What each merged call did about its destinations and weights."""
    from comfyui_toma.toma_core.patcher.merging import Merging

    turn, seen = Merging._turn, []

    def watched(self, *args):
        action, kept = turn(self, *args)
        seen.append(action.value)
        return action, kept

    monkeypatch.setattr(Merging, "_turn", watched)
    return seen


def test_weights_are_renewed_in_their_turn(models, merged, turns):
    """Counted in merged steps: select, reuse, weigh, reuse, select."""
    for name, first in (("sdxl", 0), ("flux", 1)):
        turns.clear()
        settings = {"reselect_every": 4, "reweight_every": 2}
        builders.sample(merged(models[name], **settings), **{**SIZE, "cfg": 1.0, "steps": 6})
        wanted = ["reselect", "reuse", "reweight", "reuse", "reselect", "reuse"]
        assert turns == wanted[: 6 - first], (name, turns)
