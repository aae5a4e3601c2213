"""All of ComfyUI's samplers and schedulers, and schedules of one's own."""

import builders
import pytest
import torch
from told import report


def sampler_names():
    """Read from ComfyUI's source, since tests are collected before ComfyUI is imported."""
    import ast
    import os
    from pathlib import Path

    tree = ast.parse((Path(os.environ["COMFYUI_PATH"]) / "comfy" / "samplers.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    ksampler = [e.value for e in found["KSAMPLER_NAMES"].elts]
    handlers = [k.value for k in found["SCHEDULER_HANDLERS"].keys]
    return [*ksampler, "ddim", "uni_pc", "uni_pc_bh2"], handlers


SAMPLERS, SCHEDULERS = sampler_names()


RUN = {"width": 64, "height": 64, "steps": 6, "cfg": 2.0}


def one(model, merged, sampler="euler", **run):
    """Merged at every step; forecast and merged as the plan says; and with nothing to do, the model itself. Samplers of
    CFG++ read the answer to the negative prompt, too, and an adaptive one goes by how answers differ: with them nothing
    is forecast, and tokens are merged."""
    run = {**RUN, "sampler": sampler, **run}
    patched = merged(model, reselect_every=2)
    out = builders.sample(patched, **{**run, "steps": 4})
    told = report(patched)
    assert torch.isfinite(out).all()
    assert told.tokens and told.blocks_merged == told.blocks, told.sentence()
    assert told.counts["merged"] >= len(told.kinds) - 1 and not told.counts["forecast"]

    patched = merged(model, tolerance=0.5)
    out = builders.sample(patched, **run)
    told = report(patched)
    assert torch.isfinite(out).all() and told.kinds[0] == "full", told.kinds
    ran = [e for e in told.evaluations if e.kind != "forecast"]
    never = sampler.endswith("cfg_pp") or sampler == "dpm_adaptive"
    assert any("nothing is forecast: the sampler" in note for note in told.notes) == never, told.notes
    if never:
        assert not told.counts["forecast"] and told.counts["merged"] >= 3, told.kinds
    goes_back = any(later.sigma > e.sigma for e, later in zip(ran, ran[1:]))
    assert goes_back or never or all(e.error is not None and e.error >= 0 for e in ran[1:-1]), (
        "each evaluation that runs is graded by the next"
    )
    assert not any("another node" in entry.why for entry in told.evaluations), "there is none"
    assert torch.equal(out, builders.sample(patched, **run)), "a repeated run differs"

    assert torch.equal(builders.sample(model, **run), builders.sample(merged(model, ratio=0.0), **run))
    return told


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampler(models, merged, sampler):
    for name in ("flux", "sdxl")[:: 1 if sampler in ("euler", "dpmpp_2m", "heun", "dpmpp_sde", "lcm") else 2]:
        one(models[name], merged, sampler=sampler)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "heun", "dpm_2", "deis", "res_multistep"])
def test_samplers_without_noise_are_forecast(models, merged, sampler):
    told = one(models["flux"], merged, sampler=sampler, steps=10, cfg=1.0)
    assert told.counts["forecast"] > 0, told.kinds


def test_all_samplers_are_tried(comfy):
    import comfy.samplers

    assert set(SAMPLERS) == set(comfy.samplers.SAMPLER_NAMES)
    assert set(SCHEDULERS) == set(comfy.samplers.SCHEDULER_NAMES)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler(models, merged, scheduler):
    one(models["sdxl"], merged, scheduler=scheduler)


@pytest.mark.parametrize(
    "sigmas", [[1.0, 0.0], [1.0, 0.9, 0.5, 0.2], [0.8, 0.8, 0.6, 0.6, 0.3, 0.0], [1.0, 0.5, 0.9, 0.4, 0.0]]
)
def test_schedules_of_ones_own(models, merged, sigmas):
    import comfy.sample
    import comfy.samplers

    model = models["flux"]
    latent = builders.empty_latent(model)
    noise = comfy.sample.prepare_noise(latent, 1)
    cond = builders.conditioning(model)
    outs = []
    for m in (model, merged(model, reselect_every=2)):
        args = (
            m,
            noise,
            1.0,
            comfy.samplers.sampler_object("euler"),
            torch.tensor(sigmas),
            cond,
            cond,
            latent,
        )
        outs.append(comfy.sample.sample_custom(*args, disable_pbar=True, seed=1))
    assert torch.isfinite(outs[1]).all()
    assert (outs[1] - outs[0]).norm() < outs[0].norm()
    assert report(m).steps == len(sigmas) - 1


def test_a_schedule_that_begins_with_one_sigma_twice_is_forecast(models, merged):
    import comfy.sample
    import comfy.samplers

    model = merged(models["flux"], ratio=0.0, tolerance=1.0)
    latent, cond = builders.empty_latent(model), builders.conditioning(model)
    sigmas = torch.tensor([1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    sampler = comfy.samplers.sampler_object("euler")
    noise = comfy.sample.prepare_noise(latent, 1)
    comfy.sample.sample_custom(model, noise, 1.0, sampler, sigmas, cond, cond, latent, disable_pbar=True, seed=1)
    assert report(model).counts["forecast"] and not report(model).notes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_half_precision(comfy, merged, tmp_path, name, dtype):
    """The blocks really run in half precision, and the merged result is that of fp32 within its rounding."""
    model = builders.tiny_sdxl() if name == "sdxl" else builders.tiny_flux(tmp_path / "half.safetensors", hidden=128)
    run = {"width": 128, "height": 128, "steps": 4, "cfg": 2.0}
    exact = builders.sample(merged(model), **run)
    model.model.diffusion_model.to(dtype)
    model.model.diffusion_model.dtype = dtype
    patched = merged(model)
    out = builders.sample(patched, **run)
    assert model.model.get_dtype_inference() == dtype
    assert torch.isfinite(out).all()
    assert report(patched).blocks_merged == report(patched).blocks
    unmerged = builders.sample(model, **run)
    # rounding moves picks, which costs more than rounding itself: compare with what merging costs
    cost = (exact - unmerged).norm()
    assert (out - exact).norm() < max(2 * cost, 0.02 * exact.norm())


def test_weights_in_fp8(comfy, merged, tmp_path):
    """As UNETLoader loads them: the blocks cast their own weights, and are merged all the same."""
    import folder_paths

    import nodes

    path = builders.tiny_flux_file(tmp_path / "fp8.safetensors", hidden=128)
    folder_paths.add_model_folder_path("diffusion_models", str(tmp_path))
    folder_paths.filename_list_cache.pop("diffusion_models", None)
    model = nodes.UNETLoader().load_unet(path.name, "fp8_e4m3fn")[0]
    assert {p.dtype for p in model.model.diffusion_model.parameters()} == {torch.float8_e4m3fn}
    before, patched = builders.sample(model), merged(model, reselect_every=2)
    out = builders.sample(patched)
    assert torch.isfinite(out).all()
    assert 0 < (out - before).norm() < before.norm()
    assert report(patched).blocks_merged == report(patched).blocks


def test_a_video_that_is_made_part_by_part_is_not_forecast(comfy):
    """Core's sampler for causal Wan moves the end of what the model keeps at each step, whether it ran or not."""
    import comfy.sample
    import comfy.samplers
    import tiny_models
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    if "wan21_causal_ar" not in tiny_models.available() or not hasattr(comfy.k_diffusion.sampling, "sample_ar_video"):
        pytest.skip("this release has no sampler for causal Wan")
    case = tiny_models.CASES["wan21_causal_ar"]
    patched = patch(tiny_models.build(case.name), Settings(ratio=0.5, tolerance=1.0))
    latent = tiny_models.empty_latent(case, frames=3)
    sigmas = torch.linspace(1.0, 0.0, 11)
    about = (patched, comfy.sample.prepare_noise(latent, 1), 1.0, comfy.samplers.ksampler("ar_video"), sigmas)
    out = comfy.sample.sample_custom(
        *about, tiny_models.conditioning(case, 1), tiny_models.conditioning(case, 2), latent, disable_pbar=True, seed=1
    )
    told = report(patched)
    assert torch.isfinite(out).all() and len(told.kinds) == 3 * 11, told.kinds
    assert not told.counts["forecast"] and any("part by part" in note for note in told.notes), told.notes
