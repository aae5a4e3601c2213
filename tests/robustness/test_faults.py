"""Runs that are interrupted, fail or run out of memory: the next one equals a fresh one bit for bit, and nothing of
ours is alive."""

import gc
import logging

import builders
import pytest
import torch

RUN = {"width": 128, "height": 128, "steps": 4, "cfg": 2.0}
OOM = torch.cuda.OutOfMemoryError
NO_MEMORY = "left unmerged because merging ran out of memory"
SURVIVED: list[str] = []


def merged(model, **settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    return patch(model, Settings(**{"reselect_every": 2, "skip_first_blocks": 0, **settings}))


@pytest.fixture(scope="module", autouse=True)
def only_new_objects(bench):
    """What is there before is set aside: looking through all of it after each fault takes longer than the runs."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive(*kinds: type) -> list[str]:
    gc.collect()
    return [type(o).__name__ for o in gc.get_objects() if issubclass(type(o), kinds)]


def ours_alive() -> list[str]:
    from comfyui_toma.toma_core.chunks import ChunkState
    from comfyui_toma.toma_core.evaluation import Evaluation
    from comfyui_toma.toma_core.forecast import Anchor
    from comfyui_toma.toma_core.merge import Merge
    from comfyui_toma.toma_core.patcher.merging import Merging
    from comfyui_toma.toma_core.patcher.run import Run

    return alive(Merge, ChunkState, Evaluation, Merging, Run, Anchor)


def tensors_alive() -> int:
    return len(alive(torch.Tensor))


class Raise:
    """Stands in for a function and raises at its nth call."""

    def __init__(self, error: type[Exception], at: int, original=None, text: str = "on purpose") -> None:
        self.error, self.at, self.original, self.calls, self.text = error, at, original, 0, text

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            raise self.error(self.text)
        return self.original(*args, **kwargs) if self.original else None


def check_next_run(patched, fresh, alive: int, what: str, figure) -> None:
    blocks = [m for m in patched.model.modules() if type(m).__name__.endswith(("TransformerBlock", "StreamBlock"))]
    held = [vars(block)["forward"] for block in blocks if "forward" in vars(block)]
    assert blocks and not [f for f in held if "toma" in type(f).__module__], f"{what} left a forward wrapped"
    assert torch.equal(fresh, builders.sample(patched, **RUN)), f"{what} shows in the next run"
    assert not ours_alive()
    patched.model_options["toma"].reports.clear()
    assert tensors_alive() <= alive, f"{what} left tensors behind"
    SURVIVED.append(what)
    figure("faults survived in process", f"{len(SURVIVED)}: the next run equals a fresh one, nothing is alive")


def fresh_run(patched):
    fresh = builders.sample(patched, **RUN)
    patched.model_options["toma"].reports.clear()
    return fresh, tensors_alive()


@pytest.mark.parametrize("at", range(RUN["steps"]))
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_interrupted_at_every_step(bench, figure, name, at):
    import comfy.model_management as manage

    patched = merged(bench.models[name])
    fresh, alive = fresh_run(patched)

    def interrupt(step, *_):
        if step == at:
            manage.interrupt_current_processing()
        manage.throw_exception_if_processing_interrupted()

    with pytest.raises(manage.InterruptProcessingException):
        builders.sample(patched, **{**RUN, "seed": 7}, callback=interrupt)
    assert not patched.model_options["toma"].reports[-1].finished
    check_next_run(patched, fresh, alive, f"interrupt of {name} at step {at}", figure)


def layer_of(model):
    """A layer inside of one of the last blocks."""
    network = model.model.diffusion_model
    return (
        network.middle_block[1].transformer_blocks[0].ff
        if hasattr(network, "middle_block")
        else network.single_blocks[1].linear1
    )


@pytest.mark.parametrize("error", [RuntimeError, OOM])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_a_block_fails(bench, figure, name, at, error):
    patched = merged(bench.models[name])
    fresh, alive = fresh_run(patched)
    hook = layer_of(patched).register_forward_pre_hook(Raise(error, at))
    try:
        with pytest.raises(error):
            builders.sample(patched, **{**RUN, "seed": 7})
    finally:
        hook.remove()
    check_next_run(patched, fresh, alive, f"{error.__name__} in a block of {name}, call {at}", figure)


PARTS = {
    "selection": ("toma_core.merge", "select", (1, 2)),
    "weighing": ("toma_core.merge", "weigh", (1, 2)),
    "merge": ("toma_core.merge.Merge", {"flux": "take", "sdxl": "merge"}, (1, 3)),
    "unmerge": ("toma_core.merge.Merge", "residual", (1, 2)),
}


def find(path: str):
    import importlib

    module, _, kind = path.rpartition(".")
    if kind in ("Merge", "ChunkState"):
        return getattr(importlib.import_module(f"comfyui_toma.{module}"), kind)
    return importlib.import_module(f"comfyui_toma.{path}")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_no_memory_for_our_own_work(bench, figure, monkeypatch, caplog, name, part):
    """That call runs unmerged, said once, and the run goes on."""
    path, attribute, calls = PARTS[part]
    attribute = attribute[name] if isinstance(attribute, dict) else attribute
    patched = merged(bench.models[name])
    plain = builders.sample(bench.models[name], **RUN)
    fresh, alive = fresh_run(patched)
    for at in calls:
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            holder = find(path)
            wrapper = Raise(OOM, at, getattr(holder, attribute))
            patch.setattr(holder, attribute, lambda *a, wrapper=wrapper, **k: wrapper(*a, **k))
            out = builders.sample(patched, **RUN)
        assert wrapper.calls >= at, "the fault was never reached"
        report = patched.model_options["toma"].reports[-1]
        assert report.finished and report.notes == [NO_MEMORY]
        assert sum("out of memory" in record.message for record in caplog.records) == 1
        assert torch.isfinite(out).all() and (out - plain).norm() < 1.3 * plain.norm()
        assert report.tokens, "the other calls are merged"
        del out
        check_next_run(patched, fresh, alive, f"no memory for {part} of {name}, call {at}", figure)


LAYERS = [("sdxl", "each layer"), ("sdxl", "attention only"), ("flux", "attention only")]


@pytest.mark.parametrize("work", ["merge", "unmerge"])
@pytest.mark.parametrize("name,merge", LAYERS)
def test_no_memory_inside_of_layers(bench, figure, monkeypatch, name, merge, work):
    """The whole call runs unmerged: the picture of a run whose first step was left alone."""
    from comfyui_toma.toma_core.merge import Merge
    from comfyui_toma.toma_core.settings import SettingsError

    settings = {"merge": merge, "reselect_every": 1}
    try:
        patched = merged(bench.models[name], **settings)
    except SettingsError as error:
        assert name == "flux" and "attention only" in str(error)  # ComfyUI 0.16 has no such hook
        return
    later = builders.sample(merged(bench.models[name], **settings, start_percent=1 / RUN["steps"]), **RUN)
    fresh, alive = fresh_run(patched)
    with monkeypatch.context() as patch:
        wrapper = Raise(RuntimeError, 1, getattr(Merge, work), "MPS backend out of memory (on purpose)")
        patch.setattr(Merge, work, lambda *a: wrapper(*a))
        out = builders.sample(patched, **RUN)
    assert patched.model_options["toma"].reports[-1].notes == [NO_MEMORY]
    assert torch.equal(out, later)
    del out, later
    check_next_run(patched, fresh, alive, f"no memory to {work} in {merge} of {name}", figure)


@pytest.mark.parametrize("work", ["give", "corrected", "observe"])
def test_no_memory_to_forecast(bench, figure, monkeypatch, work):
    """That step runs, or is taken as it is; the history starts anew, and it is said once."""
    from comfyui_toma.toma_core.forecast import Forecast

    run = {**RUN, "steps": 12, "cfg": 1.0}
    patched = merged(bench.models["sdxl"], ratio=0.0, tolerance=1.0)
    builders.sample(patched, **run)
    fresh, alive = builders.sample(patched, **run), ours_alive()
    assert "forecast" in patched.model_options["toma"].reports[-1].kinds
    with monkeypatch.context() as patch:
        wrapper = Raise(OOM, 2, getattr(Forecast, work))
        patch.setattr(Forecast, work, lambda *a: wrapper(*a))
        out = builders.sample(patched, **run)
    told = patched.model_options["toma"].reports[-1]
    assert wrapper.calls >= 2 and told.finished and torch.isfinite(out).all()
    assert told.notes == ["not all was forecast: forecasting ran out of memory"]
    assert len(told.kinds) == 12 and told.kinds.count("full") > 2
    assert (work != "give") or [e.why for e in told.evaluations].count("forecasting ran out of memory") == 1
    del out
    assert torch.equal(builders.sample(patched, **run), fresh) and ours_alive() == alive
    SURVIVED.append(f"no memory for {work} of a forecast")
    figure("faults survived in process", f"{len(SURVIVED)}: the next run equals a fresh one, nothing is alive")


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_no_memory_at_each_merged_step_is_not_tried_for_ever(bench, monkeypatch, name):
    from comfyui_toma.toma_core.merge import Merge
    from comfyui_toma.toma_core.patcher.merging import TRIES

    patched, calls = merged(bench.models[name], reselect_every=1), []

    def never(*args):
        calls.append(args)
        raise OOM("on purpose")

    unet = name == "sdxl"
    monkeypatch.setattr(Merge, "merge" if unet else "take", never)
    out = builders.sample(patched, **{**RUN, "steps": 8, "cfg": 1.0})
    assert torch.equal(out, builders.sample(bench.models[name], **{**RUN, "steps": 8, "cfg": 1.0}))
    assert len(calls) == TRIES and patched.model_options["toma"].reports[-1].notes == [NO_MEMORY]


SEAMS = {
    "flux, arguments of a block": ("toma_core.patcher.families.dit", "guarded", 2),
    "flux, after the last block": ("toma_core.patcher.merging", "guarded", 3),
    "flux, before the network": ("toma_core.patcher.merging", "guarded", 1),
    "sdxl, tokens for another node": ("toma_core.patcher.families.unet", "guarded", 1),
}


@pytest.mark.parametrize("what", SEAMS)
def test_no_memory_around_blocks(bench, figure, monkeypatch, what):
    from comfyui_toma.toma_core import evaluation
    from comfyui_toma.toma_core.patcher import memory

    name, (path, attribute, at) = what[:4], SEAMS[what]
    model = bench.models[name].clone()
    if name == "sdxl":
        model.set_model_attn2_patch(lambda n, context, value, extra_options: (n * 1.01, context, value))
    patched = merged(model)
    fresh, alive = fresh_run(patched)
    with monkeypatch.context() as patch:
        no_memory = evaluation.Unmergeable
        wrapper = Raise(no_memory, at, getattr(find(path), attribute), memory.OUT_OF_MEMORY)
        patch.setattr(find(path), attribute, wrapper)
        out = builders.sample(patched, **RUN)
    assert wrapper.calls > at
    report = patched.model_options["toma"].reports[-1]
    assert report.notes == [NO_MEMORY] and report.tokens
    assert torch.isfinite(out).all() and (out - fresh).norm() < 1.3 * fresh.norm()
    del out
    check_next_run(patched, fresh, alive, f"no memory for {what}", figure)


def test_no_memory_to_note_picks(bench, figure, monkeypatch, caplog):
    from comfyui_toma.toma_core.merge import Merge
    from comfyui_toma.toma_core.patcher import patch as patch_model
    from comfyui_toma.toma_core.settings import Settings

    settings = Settings(reselect_every=2, skip_first_blocks=0)
    patched = patch_model(bench.models["sdxl"], settings, record=True)
    fresh, alive = fresh_run(patched)
    with monkeypatch.context() as patch:
        wrapper = Raise(OOM, 1, Merge.assignment.func)
        patch.setattr(Merge, "assignment", property(lambda merge: wrapper(merge)))
        out = builders.sample(patched, **RUN)
    report = patched.model_options["toma"].reports[-1]
    assert torch.equal(out, fresh) and not report.notes
    assert [pick.step for pick in report.picks] == [2], "all but those of the first choice"
    assert "no memory to note the picks of step 0" in caplog.text
    del out, report
    check_next_run(patched, fresh, alive, "no memory to note picks", figure)


OOM_WORDS = [
    "MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB).",
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "Invalid buffer size: 31.64 GB",
]


def test_no_memory_in_the_words_of_other_devices(comfy):
    from comfyui_toma.toma_core.evaluation import Unmergeable
    from comfyui_toma.toma_core.patcher.memory import guarded

    for error in (OOM("x"), torch.OutOfMemoryError("x"), *map(RuntimeError, OOM_WORDS)):
        with pytest.raises(Unmergeable, match="out of memory"):
            guarded(Raise(lambda _, error=error: error, 1))
    with pytest.raises(Unmergeable, match="out of memory"):
        guarded(torch.empty, 2**60)  # the allocator's own words
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory")):
        with pytest.raises(type(error)):
            guarded(Raise(lambda _, error=error: error, 1))


def test_other_errors_of_ours_are_not_hidden(bench, monkeypatch):
    from comfyui_toma.toma_core import merge

    monkeypatch.setattr(merge, "select", Raise(RuntimeError, 1, text="shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        builders.sample(merged(bench.models["flux"]), **RUN)


def test_no_memory_at_all_is_the_unmerged_run(bench, monkeypatch):
    """Every attempt fails: what comes out is the picture without ToMA, to the last bit."""
    from comfyui_toma.toma_core import merge

    def never(*_, **__):
        raise OOM("no memory")

    monkeypatch.setattr(merge, "select", never)
    for name, model in bench.models.items():
        patched = merged(model)
        assert torch.equal(builders.sample(patched, **RUN), builders.sample(model, **RUN)), name
        assert not patched.model_options["toma"].reports[-1].tokens
