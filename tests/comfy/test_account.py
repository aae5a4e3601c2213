"""What a run says of itself when something is unusual: another node in the way, a run that was stopped, tokens
that are never merged."""

from __future__ import annotations

import builders
import pytest
import setups
import torch
from told import flops_saved, report

SIZE = {"width": 128, "height": 128, "steps": 4, "cfg": 1.0}


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("conds", [None, setups.reference, setups.two_references])
def test_saved_flops_are_those_of_all_blocks_and_tokens(models, merged, conds, skip):
    """Against torch's own FLOP counter over the transformer blocks, skipped ones and references included."""
    from torch.utils.flop_counter import FlopCounterMode

    model = models["flux"]
    positive, negative = conds(model, 128, 128) if conds else (None, None)

    def counted(model) -> int:
        total = 0
        with FlopCounterMode(display=False) as counter:
            builders.sample(model, **{**SIZE, "steps": 3}, positive=positive, negative=negative)
        for path, by_op in counter.get_flop_counts().items():
            if path.rsplit(".", 2)[-1].isdigit() and path.split(".")[-2].endswith("_blocks"):
                total += sum(by_op.values())
        return total

    patched = merged(model, ratio=0.75, skip_first_blocks=skip)
    full, run = counted(model), counted(patched)
    told = report(patched)
    assert flops_saved(told) == pytest.approx(1 - run / full, abs=0.03)
    assert told.blocks_merged == 5 - skip


def without_slots(model):
    """As packs do that bring a forward of their own: the blocks run, but not through their slots."""
    from comfy.patcher_extension import WrappersMP

    def forward(executor, *args, **kwargs):
        *args, options = args if not kwargs.get("transformer_options") else (*args, None)
        options = dict(options or kwargs.pop("transformer_options"))
        options.pop("patches_replace", None)
        options.pop("toma", None)
        return executor(*args, options, **kwargs)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "own forward", forward)
    return model


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_blocks_that_another_node_runs_itself(models, merged, name):
    patched = merged(without_slots(models[name]))
    out = builders.sample(patched, **SIZE)
    assert torch.equal(out, builders.sample(models[name], **SIZE))
    whys = ("no block of the model came by", "another node runs the blocks without their transformer_options")
    assert any(why in report(patched).sentence() for why in whys), report(patched).notes


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_all_blocks_skipped(models, merged, name):
    patched = merged(models[name], skip_first_blocks=99)
    assert torch.equal(builders.sample(patched, **SIZE), builders.sample(models[name], **SIZE))
    told = report(patched)
    assert len(told.notes) == 1 and "leaves none of the" in told.notes[0], told.notes
    assert told.blocks_merged == 0 and flops_saved(told) == 0


def test_steps_of_calls_that_cannot_be_merged(models, merged):
    model = models["flux2"]
    positive, negative = setups.reference_zero(model, 128, 128)
    patched = merged(model)
    builders.sample(patched, **SIZE, positive=positive, negative=negative)
    told = report(patched)
    assert told.kinds == ["full"] * SIZE["steps"] and any("timestep of zero" in note for note in told.notes)


def test_seconds_of_a_run_that_was_stopped(models, merged):
    class Stop(Exception):
        pass

    def stop(step, *_):
        if step == 1:
            raise Stop

    patched = merged(models["flux"])
    with pytest.raises(Stop):
        builders.sample(patched, **{**SIZE, "steps": 20}, callback=stop)
    told = report(patched)
    assert told.steps == 20 and len(told.kinds) == 2
    assert told.seconds_per_step == pytest.approx(told.seconds / 2)


def test_a_wrapper_that_splits_the_batch(models):
    """Prompt and negative prompt one by one, told as if they came together: nobody knows whose picks these are."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    def one_by_one(apply_model, args):
        halves = []
        for i in range(len(args["input"])):
            c = {k: v[i : i + 1] if isinstance(v, torch.Tensor) else v for k, v in args["c"].items()}
            halves.append(apply_model(args["input"][i : i + 1], args["timestep"][i : i + 1], **c))
        return torch.cat(halves)

    model = models["sdxl"].clone()
    model.set_model_unet_function_wrapper(one_by_one)
    patched = patch(model, Settings(ratio=0.5, reselect_every=2), record=True)
    out = builders.sample(patched, **{**SIZE, "cfg": 4.0})
    assert torch.isfinite(out).all() and report(patched).blocks_merged
    assert report(patched).picks == []


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_wrapper_that_runs_the_network_twice_in_a_call(models, kind):
    """Half of the batch, then the other: what the first has left would be taken for the other's. It is not merged."""
    import comfy.patcher_extension
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    def in_halves(executor, x, timesteps, *args, **kwargs):
        def half(values, i):
            return [v[i : i + 1] if isinstance(v, torch.Tensor) else v for v in values]

        given = [(half((x, timesteps, *args), i), dict(zip(kwargs, half(kwargs.values(), i)))) for i in (0, 1)]
        return torch.cat([executor(*some, **named) for some, named in given])

    model, run = models[kind].clone(), {**SIZE, "cfg": 1.0, "batch": 2}
    model.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, in_halves)
    patched = patch(model, Settings(ratio=0.5, reselect_every=2, skip_first_blocks=0))
    plain = builders.sample(model, **run)
    assert torch.equal(builders.sample(patched, **run), plain)
    why = {"sdxl": "more than once in one call", "flux": "on a part of the batch"}[kind]
    assert any(why in note for note in report(patched).notes), report(patched).notes


def test_a_latent_that_asks_for_gradients_is_not_merged(models, merged):
    """As ComfyUI's training does it."""
    import comfy.sample
    import comfy.samplers

    asked = []

    def training(model, x, sigmas, extra_args=None, callback=None, disable=None):
        with torch.inference_mode(False), torch.enable_grad():
            for sigma in sigmas[:-1]:
                x = x.detach().clone().requires_grad_(True)
                out = model(x, sigma.clone() * torch.ones(len(x)), **(extra_args or {}))
                asked.append(out.requires_grad)
        return out.detach()

    patched = merged(models["flux"], tolerance=0.9)
    latent, cond = builders.empty_latent(models["flux"]), builders.conditioning(models["flux"])
    noise, sigmas = comfy.sample.prepare_noise(latent, 1), torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    sampler = comfy.samplers.KSAMPLER(training)
    comfy.sample.sample_custom(patched, noise, 1.0, sampler, sigmas, cond, cond, latent, disable_pbar=True, seed=1)
    assert all(asked) and len(asked) == 5
    told = report(patched)
    assert len(told.notes) == 1 and "gradients" in told.notes[0], told.notes
    assert told.blocks_merged == 0 and not told.counts["forecast"]
    assert any("training" in note for note in told.notes)


def test_half_precision_at_its_limit(comfy, tmp_path, merged):
    """ComfyUI keeps Flux's half-precision sums finite by cutting them off: so do ours."""
    model = builders.tiny_flux(tmp_path / "half.safetensors", hidden=128, depth=2, depth_single=3)
    network = model.model.diffusion_model.half()
    network.dtype = model.model.manual_cast_dtype = torch.float16
    for block in network.single_blocks:
        block.linear2.weight.data *= 4e4
    size = {**SIZE, "steps": 3}
    reached = []

    def watch(_, args, output):
        reached.append(output.abs().max().item())

    hook = network.single_blocks[-1].register_forward_hook(watch)
    assert torch.isfinite(builders.sample(model, **size)).all()
    hook.remove()
    assert max(reached) >= 65504, "the case is not at the limit"
    patched = merged(model)
    assert torch.isfinite(builders.sample(patched, **size)).all()
    assert report(patched).blocks_merged


def test_reasons_that_differ_by_a_number_only_are_one():
    from comfyui_toma.toma_core.patcher.report import Evaluated, Report
    from comfyui_toma.toma_core.settings import Settings

    told = Report("flux", Settings(), blocks=1)
    whys = [*["not known yet"] * 4, *(f"a forecast would be off by {off} times" for off in (1.3, 2, "1e+03"))]
    told.evaluations = [Evaluated(step, 1.0, "full", why) for step, why in enumerate(whys)]
    assert told.usual_reason == "a forecast would be off by 1e+03 times"


def test_the_reason_of_the_first_steps_comes_last():
    from comfyui_toma.toma_core.patcher.report import Evaluated, Report
    from comfyui_toma.toma_core.plan import UNKNOWN
    from comfyui_toma.toma_core.settings import Settings

    told = Report("flux", Settings(), blocks=1)
    told.evaluations = [Evaluated(step, 1.0, "full", why) for step, why in enumerate([UNKNOWN, UNKNOWN, "at the end"])]
    assert told.usual_reason == "at the end"
    told.evaluations.pop()
    assert told.usual_reason == UNKNOWN


def test_a_note_about_merging_is_no_reason_for_forecasts(models, merged):
    """Nothing was merged and nothing forecast: both are told."""
    patched = merged(models["flux"], tolerance=1e-6, skip_first_blocks=99)
    builders.sample(patched, **{**SIZE, "steps": 8})
    told = report(patched)
    assert told.counts == {"full": 8, "merged": 0, "forecast": 0}
    assert any(note.startswith("tokens are not merged: ") for note in told.notes)
    assert any(note.startswith("nothing was forecast or merged: a forecast would be off by") for note in told.notes)
