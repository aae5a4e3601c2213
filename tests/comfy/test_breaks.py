"""Where a forecast must not cross: something begins or ends, goes back, or another node answers."""

import builders
import models as tiny
import pytest
import setups
import torch
from test_forecasts import EAGER, RUN, EveryOther, network_calls, planned
from told import report


def late(model):
    return setups.late(model, 64, 64)


def control_for_a_part(model):
    import nodes

    make = tiny.control_sdxl if "model_channels" in model.model.model_config.unet_config else tiny.control_flux
    hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(7))
    positive, negative = setups.plain(model, 64, 64)
    return nodes.ControlNetApplyAdvanced().apply_controlnet(positive, negative, make(model), hint, 0.8, 0.0, 0.5)


def keyframes(model):
    import comfy.hooks

    group = comfy.hooks.HookGroup()
    hook = comfy.hooks.TransformerOptionsHook(transformers_dict={})
    hook.hook_keyframe = comfy.hooks.HookKeyframeGroup()
    for strength, start in ((1.0, 0.0), (0.5, 0.5)):
        hook.hook_keyframe.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
    group.add(hook)
    positive, negative = setups.plain(model, 64, 64)
    return [[text, {**about, "hooks": group}] for text, about in positive], negative


BREAKS = {"conditioning": late, "controlnet": control_for_a_part, "hook keyframe": keyframes}


def check_break(models, conds, name: str = "flux") -> None:
    """The first evaluation after something began or ended has no history, and so runs in full."""
    model = models[name]
    positive, negative = BREAKS[conds](model)
    patched, plans = planned(model)
    builders.sample(patched, **RUN, positive=positive, negative=negative)
    plan, told = plans[-1], report(patched)
    assert plan.restarts and plan.asked.count(0) >= 2, plan.asked
    broken = plan.asked.index(0, 1)
    assert 2 < broken < RUN["steps"] - 1 and told.kinds[broken] == told.kinds[broken + 1] == "full"
    assert told.counts["forecast"] >= 3
    # half of the schedule, by the sigmas of the model itself
    ms = model.get_model_object("model_sampling")
    half = ms.percent_to_sigma(0.5)
    before, after = (told.evaluations[i].sigma > torch.tensor(half) for i in (broken - 1, broken))
    assert (before and not after) or conds == "controlnet"


@pytest.mark.parametrize("conds", BREAKS)
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_a_forecast_does_not_cross_a_break(models, conds, name):
    check_break(models, conds, name)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_breaks_are_where_comfyui_has_them(models, name):
    """A bound that is one of the sigmas but for rounding: ComfyUI compares in fp32."""
    from comfy.samplers import calculate_sigmas, get_area_and_mult
    from comfyui_toma.toma_core.patcher.breaks import phase_of

    sampling = models[name].get_model_object("model_sampling")
    x, met = torch.zeros(1, 4, 8, 8), 0
    for part in range(1, 20):
        bound = sampling.percent_to_sigma(part / 20)
        for which in ("timestep_start", "timestep_end"):
            cond = {"model_conds": {}, "uuid": None, which: bound}
            for sigma in calculate_sigmas(sampling, "simple", 20)[:-1]:
                at_work = get_area_and_mult(cond, x, sigma[None]) is not None
                assert all(phase_of({"positive": [cond]}, sigma.item())) == at_work, (part, which, sigma)
                met += sigma.item() != bound and abs(sigma.item() - bound) < 1e-6
    assert met or name == "sdxl", "no bound was at the edge of rounding"


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_nor_another_guidance(models, name):
    """Core's CFGOverride sets the guider's cfg from half of the schedule on."""
    from comfy_extras import nodes_custom_sampler

    if not hasattr(nodes_custom_sampler, "CFGOverride"):
        pytest.skip("this release has no CFGOverride")
    guided = nodes_custom_sampler.CFGOverride.execute(models[name], 1.5, 0.5, 1.0).args[0]
    patched, plans = planned(guided)
    builders.sample(patched, **RUN)
    told, broken = report(patched), plans[-1].asked.index(0, 1)
    half = guided.get_model_object("model_sampling").percent_to_sigma(0.5)
    assert told.evaluations[broken - 1].sigma > half >= told.evaluations[broken].sigma
    assert told.kinds[broken] == "full" and "start anew" in told.evaluations[broken].why


def test_without_a_break_there_is_none(models):
    patched, plans = planned(models["flux"])
    builders.sample(patched, **RUN)
    assert plans[-1].restarts == 0 and plans[-1].asked[:3] == [0, 1, 2] and set(plans[-1].asked[2:]) == {2}


def custom(model, sigmas, sampler="euler", noise=None):
    import comfy.sample
    import comfy.samplers

    latent = builders.empty_latent(model, 64, 64)
    noise = comfy.sample.prepare_noise(latent, 1) if noise is None else noise
    cond = builders.conditioning(model)
    kind = comfy.samplers.sampler_object(sampler) if isinstance(sampler, str) else sampler
    args = (model, noise, 1.0, kind, torch.tensor(sigmas), cond, cond, latent)
    return comfy.sample.sample_custom(*args, disable_pbar=True, seed=1)


SCHEDULES = {
    "backwards": ([1.0, 0.9, 0.8, 0.7, 0.85, 0.6, 0.4, 0.2, 0.0], 4),
    "steps that put noise in": ([0.8, 0.7, 0.6, 0.9, 0.5, 0.3, 0.0], 3),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_nor_a_schedule_that_goes_back(models, case):
    sigmas, broken = SCHEDULES[case]
    patched, plans = planned(models["flux"])
    out = custom(patched, sigmas)
    assert torch.isfinite(out).all()
    assert plans[-1].asked[broken] == 0 and plans[-1].restarts == 1, plans[-1].asked


def test_nor_steps_that_a_sampler_leaves_out(models):
    """As samplers of other packs do that skip steps by themselves."""
    import comfy.samplers

    def skips(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for i in (0, 1, 2, 6, 7, 8):
            denoised = model(x, sigmas[i] * x.new_ones([x.shape[0]]), **(extra_args or {}))
            x = denoised + sigmas[i + 1] * torch.zeros_like(x)
        return x

    patched, plans = planned(models["flux"])
    custom(patched, [1 - i / 9 for i in range(10)], comfy.samplers.KSAMPLER(skips))
    assert plans[-1].asked[3] == 0 and plans[-1].restarts == 1, plans[-1].asked


def test_nor_another_size_of_the_latent(models):
    """A sampler that grows its latent on the way."""
    import comfy.samplers

    def grows(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for i in range(len(sigmas) - 1):
            if i == 4:
                x = torch.cat((x, x), 2)
            denoised = model(x, sigmas[i] * x.new_ones([x.shape[0]]), **(extra_args or {}))
            x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        return x

    patched, plans = planned(models["flux"])
    out = custom(patched, [1 - i / 9 for i in range(10)], comfy.samplers.KSAMPLER(grows))
    assert out.shape[2] == 16 and plans[-1].asked[4] == 0 and plans[-1].restarts == 1, plans[-1].asked


def check_further_pass(models) -> None:
    """Skip layer guidance asks a third time, up to half of the schedule: nothing in the conditionings tells of it."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    guided = SkipLayerGuidanceDiT.execute(models["flux"], 3.0, 0.0, 0.5, "0", "0", 0.0).args[0]
    counted, calls = network_calls(guided)
    patched, plans = planned(counted)
    builders.sample(patched, **RUN)
    assert plans[-1].restarts == 1 and calls
    after = plans[-1].asked.index(1, 2)  # the first answer without that pass is the first of a new history
    assert plans[-1].asked[after - 1] == 2 and report(patched).kinds[after - 1] == "full"


def test_nor_the_end_of_a_further_pass(models):
    check_further_pass(models)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_nor_an_answer_of_another_node(models, name):
    """A cache that answers in the model's place, as EasyCache and LazyCache do: what it says is no history."""
    from comfy.patcher_extension import WrappersMP

    model, seen = models[name].clone(), []

    def cache(executor, x, *args, **kwargs):
        seen.append(executor(x, *args, **kwargs) if len(seen) != 4 else seen[-1])
        return seen[-1]

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "cache", cache)
    patched, plans = planned(model)
    builders.sample(patched, **{**RUN, "cfg": 1.0})
    told = report(patched)
    answered = [i for i, e in enumerate(told.evaluations) if "another node answered" in e.why]
    assert len(answered) == 1 and plans[-1].restarts == 1
    assert plans[-1].asked[answered[0] + 1] == 0 and told.evaluations[answered[0]].error is None


def test_but_over_a_call_that_was_run_again(models, monkeypatch):
    """What could not go on merged goes through the network twice: that is no further pass of another node."""
    from comfyui_toma.toma_core.evaluation import Unmergeable
    from comfyui_toma.toma_core.patcher.merging import Merging
    from comfyui_toma.toma_core.plan import Decision, Kind

    class MergesOnce(EveryOther):
        def next(self, moment, places):
            decision = super().next(moment, places)
            return Decision(Kind.MERGED, "as it is told") if len(self.asked) == 4 else decision

    def fails(self, evaluation, out):
        raise Unmergeable("of this test")

    monkeypatch.setattr(Merging, "_unmerged", fails)
    patched, plans = planned(models["flux"], MergesOnce, ratio=0.5)
    builders.sample(patched, **{**RUN, "cfg": 1.0})
    assert "left unmerged because of this test" in report(patched).notes
    assert not plans[-1].restarts and plans[-1].asked.count(0) == 1, plans[-1].asked


def test_words_in_options_are_found_whatever_the_keys_are():
    from comfyui_toma.toma_core.patcher.breaks import asked_for

    assert asked_for({("a", 1): "word", "b": "other", 3: 4}) == asked_for({"b": "other", ("a", 1): "word"})
    assert asked_for({"b": "other"}) != asked_for({"b": "word"})


@pytest.mark.parametrize("kind", ["EasyCacheNode", "LazyCacheNode"])
def test_with_comfyuis_own_caches(models, merged, kind):
    import comfy_extras.nodes_easycache as caches

    make = getattr(caches, kind).execute
    for order in (lambda: make(merged(models["flux"], **EAGER), 3.0, 0.0, 1.0, False).args[0],
                  lambda: merged(make(models["flux"], 3.0, 0.0, 1.0, False).args[0], **EAGER)):  # fmt: skip
        patched = order()
        assert torch.isfinite(builders.sample(patched, **RUN)).all()
        told = report(patched)
        assert told.finished
        answered = [i for i, e in enumerate(told.evaluations) if "another node answered" in e.why]
        assert all(told.kinds[i + 1] == "full" for i in answered if i + 1 < len(told.kinds))
