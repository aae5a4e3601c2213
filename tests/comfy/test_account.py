"""What a run says of itself when something is unusual: another node in the way, a run that was stopped, tokens
that are never merged."""

from __future__ import annotations

import builders
import pytest
import setups
import torch
from told import report

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
    assert told.flops_saved == pytest.approx(1 - run / full, abs=0.03)
    assert told.blocks_merged == (max(0, 2 - skip) + 3 - skip)


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
    assert any("no block of the model came by" in why for why in report(patched).unmerged_because)
    assert "no block of the model came by" in report(patched).sentence()


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_all_blocks_skipped(models, merged, name):
    patched = merged(models[name], skip_first_blocks=99)
    assert torch.equal(builders.sample(patched, **SIZE), builders.sample(models[name], **SIZE))
    told = report(patched)
    assert [why for why in told.unmerged_because if "skip_first_blocks leaves none" in why]
    assert told.blocks_merged == 0 and told.flops_saved == 0


def test_steps_of_calls_that_cannot_be_merged(models, merged):
    model = models["flux2"]
    positive, negative = setups.reference_zero(model, 128, 128)
    patched = merged(model)
    builders.sample(patched, **SIZE, positive=positive, negative=negative)
    assert report(patched).actions == ["LEAVE"] * SIZE["steps"]
    assert "skipped by another node" not in report(patched).sentence()


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
    assert told.steps == 20 and len(told.actions) == 2
    assert told.seconds_per_step == pytest.approx(told.seconds / 2)


def test_old_drift_is_dropped_before_the_step_that_renews_it(models, merged, monkeypatch):
    """That step needs the most memory. What was added it needs, to see how that has changed."""
    from comfyui_toma.toma_core.patcher.call import Call
    from comfyui_toma.toma_core.patcher.run import Run

    decide, held = Run._call, []

    def as_large_as_the_tokens(part) -> int:
        tensors = [t for d in part[0].details.values() for t in (d.added, d.drift, d.beyond)]
        return sum(tensor is not None and tensor.shape[1] == 64 for tensor in tensors)

    def watched(self, *args, **about) -> Call:
        call = decide(self, *args, **about)
        held.append((call.action.name, sum(map(as_large_as_the_tokens, self.kept.values()))))
        return call

    monkeypatch.setattr(Run, "_call", watched)
    builders.sample(merged(models["flux"], reselect_every=2), **{**SIZE, "steps": 6})
    turns = [("RESELECT", 0), ("REUSE", 2), ("RESELECT", 2), ("REUSE", 4), ("RESELECT", 2), ("REUSE", 4)]
    assert held == turns


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
    plain = builders.sample(model, **run)
    patched = patch(model, Settings(ratio=0.5, reselect_every=2, skip_first_blocks=0))
    assert torch.equal(builders.sample(patched, **run), plain)
    assert any("more than once in one call" in why for why in report(patched).unmerged_because)


def test_a_latent_that_asks_for_gradients_is_not_merged(models, merged):
    """As ComfyUI's training does it."""
    model = models["flux"].clone()
    asked = []

    def with_gradients(apply_model, args):
        with torch.inference_mode(False), torch.enable_grad():
            x = args["input"].detach().clone().requires_grad_(True)
            out = apply_model(x, args["timestep"], **args["c"])
            asked.append(out.requires_grad)
        return out.detach()

    model.set_model_unet_function_wrapper(with_gradients)
    patched = merged(model)
    builders.sample(patched, **SIZE)
    assert all(asked) and len(asked) == SIZE["steps"]
    assert report(patched).blocks_merged == 0
    assert any("training" in why for why in report(patched).unmerged_because)


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
