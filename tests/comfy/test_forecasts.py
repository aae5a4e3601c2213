"""Forecasts in real sampling runs: what they spare, and that they hold to a run."""

import copy

import builders
import pytest
import torch
from told import report

RUN = {"width": 64, "height": 64, "steps": 12, "cfg": 2.0}
EAGER = {"ratio": 0.0, "tolerance": 0.9}


class EveryOther:
    """A plan that forecasts whatever can be: only the history can forbid it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.learnt: list[tuple[float, float]] = []
        self.restarts = 0

    def next(self, moment, places):
        from comfyui_toma.toma_core.plan import Decision, Kind

        self.asked.append(len(places))
        return Decision(Kind.FORECAST if len(places) == 2 and len(self.asked) % 2 else Kind.FULL, "as it is told")

    def learn(self, error, gain):
        self.learnt.append((error, gain))
        return error

    def restart(self):
        self.restarts += 1


def planned(model, kind: type = EveryOther, **settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    plans: list[EveryOther] = []

    def plan():
        plans.append(kind())
        return plans[-1]

    return patch(model, Settings(**{**EAGER, **settings}), plan=plan), plans


def network_calls(model) -> tuple[object, list]:
    from comfy.patcher_extension import WrappersMP

    calls: list[float] = []
    model = model.clone()

    def count(executor, x, t, *args, **kwargs):
        calls.append(float(t.flatten()[0]))
        return executor(x, t, *args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "count", count)
    return model, calls


@pytest.mark.parametrize("name", ["flux", "sdxl", "sd15", "flux2"])
def test_a_forecast_step_runs_nothing(models, merged, name):
    counted, calls = network_calls(models[name])
    before = builders.sample(counted, **{**RUN, "cfg": 1.0})
    full = len(calls)
    patched = merged(counted, **EAGER)
    calls.clear()
    out = builders.sample(patched, **{**RUN, "cfg": 1.0})
    told = report(patched)
    assert full == RUN["steps"] == len(told.kinds)
    assert len(calls) == full - told.counts["forecast"] < full
    assert told.work_speedup == pytest.approx(full / len(calls), rel=1e-6)
    assert [e.work for e in told.evaluations if e.kind == "forecast"] == [0.0] * told.counts["forecast"]
    assert 0 < (out - before).norm() < 0.5 * before.norm()


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_less_tolerance_is_closer(models, merged, name):
    before = builders.sample(models[name], **RUN)
    near, eager = (merged(models[name], ratio=0.0, tolerance=tolerance) for tolerance in (0.05, 1.0))
    distances = [float((builders.sample(patched, **RUN) - before).norm()) for patched in (near, eager)]
    counts = [report(patched).counts["forecast"] for patched in (near, eager)]
    assert counts[0] < counts[1] and distances[0] < distances[1], (distances, counts)


# --------------------------------------------------------------------------- a run is one run


def check_runs_apart(models, merged) -> None:
    """The history of a run is not that of the next, of any size."""
    patched = merged(models["flux"], **EAGER)
    fresh = builders.sample(patched, **RUN)
    builders.sample(patched, **{**RUN, "seed": 4})
    assert torch.equal(fresh, builders.sample(patched, **RUN))
    builders.sample(patched, **{**RUN, "width": 96, "steps": 3})
    assert torch.equal(fresh, builders.sample(patched, **RUN))


def test_runs_are_apart(models, merged):
    check_runs_apart(models, merged)


def test_options_that_are_copied_deeply_are_the_same_run(models, merged):
    """As packs do, at each step: the same image, the same number of forecasts."""
    from comfy.patcher_extension import WrappersMP

    def copies(executor, x, timestep, model_options={}, seed=None):  # noqa: B006
        return executor(x, timestep, copy.deepcopy(model_options), seed)

    for settings in (EAGER, {"ratio": 0.5}, {"ratio": 0.5, "tolerance": 0.3}):
        for name in ("flux", "sdxl"):
            plain = merged(models[name], **settings)
            copying = merged(models[name], **settings)
            copying.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "copies", copies)
            assert torch.equal(builders.sample(plain, **RUN), builders.sample(copying, **RUN)), (name, settings)
            assert report(plain).kinds == report(copying).kinds


class Full(EveryOther):
    def next(self, moment, places):
        from comfyui_toma.toma_core.plan import Decision, Kind

        self.asked.append(len(places))
        return Decision(Kind.FULL, "as it is told")


def check_grades(models) -> None:
    """The grade of an evaluation is the relative error of the forecast in its place, and reaches it and the plan."""
    from comfyui_toma.toma_core.forecast import GAIN, LEARNING

    patched, plans = planned(models["flux"], Full)
    answers: list[torch.Tensor] = []
    builders.sample(patched, **{**RUN, "steps": 6}, callback=lambda step, x0, *_: answers.append(x0.clone()))
    told = report(patched)
    places = [1 - e.sigma for e in told.evaluations]  # of a flow
    wanted = [None, float((answers[0] - answers[1]).norm() / answers[1].norm())]
    gain = GAIN
    for i in range(2, 5):
        line = (answers[i - 1] - answers[i - 2]) * (places[i] - places[i - 1]) / (places[i - 1] - places[i - 2])
        forecast, came = answers[i - 1] + gain * line, answers[i] - answers[i - 1]
        way = answers[i] - answers[i - 2]
        best = float((came * way).sum() / (line * way).sum())
        gain += LEARNING * (min(max(best, 0.0), 1.0) - gain)
        wanted.append(float((forecast - answers[i]).norm() / answers[i].norm()))
    errors = [e.error for e in told.evaluations]
    assert errors[0] is None and errors[-1] is None, "the last one nobody reads"
    assert errors[1:-1] == pytest.approx(wanted[1:], rel=1e-3)
    assert [error for error, _ in plans[-1].learnt] == errors[1:-1]
    assert plans[-1].learnt[-1][1] == pytest.approx(gain, rel=1e-3)


def test_grades_are_of_their_step(models):
    check_grades(models)


def test_error_maps_are_recorded_for_a_preview(models):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    patched = patch(models["flux"], Settings(**EAGER), record=True)
    builders.sample(patched, **RUN)
    told = report(patched)
    ran = [e.step for e in told.evaluations if e.kind != "forecast"]
    assert [shown.step for shown in told.error_maps] == ran[1:]
    assert all(shown.error.shape == (1, 1, 8, 8) and torch.isfinite(shown.error).all() for shown in told.error_maps)


@pytest.mark.parametrize("settings", [EAGER, {"ratio": 0.5, "tolerance": 0.3}, {"ratio": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_at_most_one_read_from_the_device_a_step(models, merged, monkeypatch, name, settings):
    """Counted by what torch dispatches while the run's own code is at work, the sampler's and the model's aside."""
    from comfyui_toma.toma_core.patcher.run import Run
    from torch.utils._python_dispatch import TorchDispatchMode

    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"):
                reads.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Aside:
        """The executor of what is not ours: not counted."""

        def __init__(self, executor) -> None:
            self.executor, self.class_obj = executor, executor.class_obj

        def __call__(self, *args, **kwargs):
            before = len(reads)
            out = self.executor(*args, **kwargs)
            del reads[before:]
            return out

    predict, each = Run.predict_noise, []

    def counted(self, executor, *args, **kwargs):
        before = len(reads)
        with Reads():
            out = predict(self, Aside(executor), *args, **kwargs)
        each.append(len(reads) - before)
        return out

    monkeypatch.setattr(Run, "predict_noise", counted)
    builders.sample(merged(models[name], **settings), **RUN)
    # one of a tensor of two numbers is two scalars read at once; the first step reads the schedule, too
    assert len(each) == RUN["steps"] and max(each[1:]) <= 2, each
