"""LoRA, ControlNet and the patches of other nodes, before and after ToMA: one result, and each still has its effect."""

from __future__ import annotations

import builders
import models as tiny
import pytest
import setups
import torch
from told import flops_saved, report

RUN = {"width": 128, "height": 128, "steps": 5, "cfg": 2.0}
RATIO = 0.1  # with random weights no two tokens are alike: few are merged, so that effects can be told


def lora(model):
    return tiny.lora_for(model)


def attn1_output(model):
    """As attention-strength nodes do: scales what self-attention gives, by the place of the token."""
    model = model.clone()

    def patch(n, extra_options):
        height, width = extra_options["activations_shape"][2:]
        ramp = torch.linspace(0.2, 1.8, width).repeat(height)
        return n * ramp[None, :, None]

    model.set_model_attn1_output_patch(patch)
    return model


def attn1_replace(model):
    """As PAG does: self-attention of some blocks gives its values."""
    model = model.clone()
    for index in range(3):
        model.set_model_attn1_replace(lambda q, k, v, extra_options: v, "middle", 0, index)
    return model


def attn2_replace(model):
    """As IPAdapter does with a mask: cross-attention to something else, on the left half of the picture."""
    from comfy.ldm.modules.attention import optimized_attention

    model = model.clone()

    def replace(q, k, v, extra_options):
        heads = extra_options["n_heads"]
        out = optimized_attention(q, k, v, heads)
        height, width = extra_options["activations_shape"][2:]
        left = (torch.arange(width) < width // 2).float().repeat(height)
        other = optimized_attention(q, k.flip(-1), v.flip(-1), heads)
        return out + 0.5 * other * left[None, :, None]

    for block, number in [("input", 4), ("input", 5), ("output", 3), ("middle", 0)]:
        model.set_model_attn2_replace(replace, block, number)
    return model


def attention_couple(model):
    """As attention couple does: cross-attention on a doubled batch of prompts, joined by masks afterwards."""
    model = model.clone()

    def before(n, context, value, extra_options):
        return torch.cat((n, n)), torch.cat((context, context.flip(-1))), torch.cat((value, value.flip(-1)))

    def after(n, extra_options):
        height, width = extra_options["activations_shape"][2:]
        left = (torch.arange(width) < width // 2).float().repeat(height)[None, :, None]
        first, second = n.chunk(2)
        return first * left + second * (1 - left)

    model.set_model_attn2_patch(before)
    model.set_model_attn2_output_patch(after)
    return model


def hypertile(model):
    from comfy_extras.nodes_hypertile import HyperTile

    args = (model, 32, 1, 1, False)  # the smallest tiles, of one size: larger choices are drawn at random
    result = HyperTile.execute(*args) if hasattr(HyperTile, "execute") else HyperTile().patch(*args)
    return result.args[0] if hasattr(result, "args") else result[0]


def middle(model):
    """As GLIGEN does: something is added to the tokens between self- and cross-attention."""
    model = model.clone()

    def patch(x, extra_options):
        assert x.shape[1] == extra_options["activations_shape"][2] * extra_options["activations_shape"][3]
        return x + 0.3

    model.set_model_patch(patch, "middle_patch")
    return model


def dit_replace(model):
    """A node with a slot of its own on some blocks: scales what the block adds."""
    model = model.clone()
    slots = model.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})

    def wrap(slot):
        inner = slots.get(slot)

        def replace(args, extra):
            before = args["img"].clone()
            out = inner(args, extra) if inner else extra["original_block"](args)
            return {**out, "img": before + 0.5 * (out["img"] - before)}

        return replace

    for kind in ("double_block", "single_block"):
        model.set_model_patch_replace(wrap((kind, 1)), "dit", kind, 1)
    return model


PAIRS = [
    ("flux", lora), ("flux", dit_replace), ("sdxl", lora), ("sdxl", attn1_output), ("sdxl", attn1_replace),
    ("sdxl", attn2_replace), ("sdxl", attention_couple), ("sdxl", hypertile), ("sdxl", middle),
]  # fmt: skip


@pytest.mark.parametrize("name,other", [pytest.param(n, o, id=f"{n}-{o.__name__}") for n, o in PAIRS])
def test_before_and_after(models, merged, name, other):
    model = models[name]
    torch.manual_seed(0)
    plain, with_other = builders.sample(model, **RUN), builders.sample(other(model), **RUN)
    effect = with_other - plain
    assert effect.norm() > 1e-3 * plain.norm(), "the other node does nothing, this test would show nothing"
    outs = []
    for order in (lambda: merged(other(model), ratio=RATIO), lambda: other(merged(model, ratio=RATIO))):
        patched = order()
        outs.append(builders.sample(patched, **RUN))
        told = report(patched)
        if other is dit_replace:  # code of its own in the place of blocks: that run is the other node's, and says why
            assert any("another node runs code of its own" in note for note in told.notes) and not told.tokens
        else:
            assert told.blocks_merged == told.blocks, told.sentence()
    assert (outs[0] - outs[1]).norm() <= 1e-4 * outs[0].norm(), "the order of the nodes matters"
    if other is dit_replace:
        assert torch.equal(outs[0], with_other)
        return
    ours = outs[0] - builders.sample(merged(model, ratio=RATIO), **RUN)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), effect.flatten(), dim=0) > 0.3, "its effect is gone"
    assert torch.equal(plain, builders.sample(model, **RUN))


@pytest.mark.parametrize("merge", ["each layer", "attention only"])
@pytest.mark.parametrize("other", [attn1_output, attn1_replace, attn2_replace, attention_couple, hypertile])
def test_other_ways_of_merging_leave_room_for_others(models, merged, other, merge):
    with_other = builders.sample(other(models["sdxl"]), **RUN)
    patched = other(merged(models["sdxl"], merge=merge, ratio=0.25))
    out = builders.sample(patched, **RUN)
    assert (out - with_other).norm() < 0.8 * with_other.norm()
    assert report(patched).blocks_merged == report(patched).blocks


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_controlnet_keeps_its_effect(models, merged, name):
    model = models[name]
    positive, negative = setups.control(model, 128, 128)
    plain = builders.sample(model, **RUN)
    effect = builders.sample(model, positive=positive, negative=negative, **RUN) - plain
    patched = merged(model, ratio=RATIO)
    ours = builders.sample(patched, positive=positive, negative=negative, **RUN) - builders.sample(patched, **RUN)
    assert effect.norm() > 1e-3 * plain.norm()
    assert torch.nn.functional.cosine_similarity(ours.flatten(), effect.flatten(), dim=0) > 0.5


def spatial_transformers(model):
    """The spatial transformers of a UNet."""
    return (module for module in model.model.diffusion_model.modules() if type(module).__name__ == "SpatialTransformer")


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_a_call_that_is_run_again_still_has_its_controlnet(models, merged, monkeypatch, name):
    """A UNet takes a ControlNet's residuals out of their lists. The first merged call runs out of memory in the middle
    of the network: the image must be that of a run whose call was left alone from the start."""
    from comfyui_toma.toma_core.merge import Merge

    positive, negative = setups.control(models[name], 128, 128)
    given = {**RUN, "cfg": 1.0, "positive": positive, "negative": negative}
    first = 0 if name == "sdxl" else 1  # on a DiT nothing is merged before there is a clean estimate
    late = {"ratio": RATIO, "reselect_every": 1, "start_percent": (first + 1) / RUN["steps"]}
    alone = builders.sample(merged(models[name], **late), **given)
    patched, calls, residual = merged(models[name], ratio=RATIO, reselect_every=1), [], Merge.residual
    rows = len(list(spatial_transformers(models[name]))) or 1  # on a DiT the whole network is one

    def fails_once(self, *args):
        calls.append(True)
        if len(calls) == rows:  # in the last row of the first merged call
            raise torch.cuda.OutOfMemoryError("on purpose")
        return residual(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Merge, "residual", fails_once)
        out = builders.sample(patched, **given)
    assert len(calls) > rows and "left unmerged because merging ran out of memory" in report(patched).notes
    assert torch.equal(out, alone)


def test_patches_that_know_tokens_by_their_number_see_all_of_them(models, merged):
    """Inside of a DiT's blocks: Anima's LLLite, a cache of reference tokens."""
    lengths = []

    def attn1(q, k, v, pe=None, attn_mask=None, extra_options=None, **_):
        lengths.append(q.shape[-2])
        return {"q": q, "k": k, "v": v, "pe": pe, "attn_mask": attn_mask}

    if not attention_hook(models["flux"]):
        return  # ComfyUI 0.16 has no such hook
    other = models["flux"].clone()
    other.set_model_patch(attn1, "attn1_patch")
    patched = merged(other, ratio=RATIO)
    out = builders.sample(patched, **RUN)
    assert len(set(lengths)) == 1 and torch.equal(out, builders.sample(other, **RUN))
    assert report(patched).notes == [
        "tokens are not merged: a patch of another node works on all tokens inside of blocks"
    ]


def test_references_whose_usual_method_another_node_has_changed(models, monkeypatch):
    """Core's FluxKVCache sets it on the network: their modulation then goes by token ranges."""
    from comfyui_toma.toma_core.patcher import family_of
    from comfyui_toma.toma_core.settings import Settings

    model, x = models["flux"], torch.zeros(1, 16, 16, 16)
    family = family_of(model).arrange(Settings())
    options = {}
    family.install(options)
    assert family.why_not(x, options, {"ref_latents": [x]}) is None
    monkeypatch.setattr(model.model.diffusion_model.params, "default_ref_method", "index_timestep_zero", raising=False)
    assert "timestep of zero" in family.why_not(x, options, {"ref_latents": [x]})
    assert family.why_not(x, options, {"ref_latents": [x], "ref_latents_method": "offset"}) is None
    assert family.why_not(x, options, {}) is None


def test_what_is_added_between_blocks_reaches_the_kept_tokens(models):
    """Patches of other nodes see all tokens, copies of the kept ones, and these get their own part of what the patches
    and ControlNets add; reference tokens behind the image are left as they are."""
    from comfyui_toma.toma_core.chunks import ChunkState
    from comfyui_toma.toma_core.evaluation import Evaluation, Unmergeable
    from comfyui_toma.toma_core.patcher import family_of
    from comfyui_toma.toma_core.plan import Action
    from comfyui_toma.toma_core.settings import Settings

    settings = Settings(ratio=0.5, skip_first_blocks=0)
    family = family_of(models["flux"]).arrange(settings)
    evaluation = Evaluation(settings, Action.RESELECT, ChunkState(1), in_x0=True, grid=(8, 8))
    tokens, adds = torch.randn(2, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    kept, merge = evaluation.enter(family.blocks[0], tokens, (8, 8))
    beside = torch.randn(2, 5, 16)
    seen = []

    def patch(args):
        seen.append(args["img"])
        return {**args, "img": args["img"] + torch.cat((adds, torch.zeros_like(beside)), 1)}

    control = {"input": [adds, None], "output": []}
    options, control = family.shorter_inputs(evaluation, {"patches": {"double_block": [patch]}}, control)
    out = options["patches"]["double_block"][0]({"img": torch.cat((kept, beside), 1), "txt": None})
    assert torch.equal(seen[0], torch.cat((merge.copied(kept), beside), 1))
    assert torch.allclose(out["img"], torch.cat((kept + merge.take(adds), beside), 1))
    assert torch.equal(control["input"][0], merge.take(adds)) and control["input"][1] is None
    for_all = family.shorter_inputs(evaluation, {}, {"input": [adds[:, :1], None]})[1]
    assert torch.equal(for_all["input"][0], adds[:, :1])
    with pytest.raises(Unmergeable, match="adds to 60 of 64 image tokens"):
        family.shorter_inputs(evaluation, {}, {"input": [adds[:, :60], None]})


def attention_hook(flux) -> bool:
    """Whether this release calls attention patches in a Flux block."""
    import inspect

    return "attn1_patch" in inspect.getsource(type(flux.model.diffusion_model.double_blocks[0]).forward)


@pytest.mark.parametrize("merge", ["whole block", "each layer", "attention only"])
@pytest.mark.parametrize("name", ["flux", "sdxl", "sd15"])
def test_every_way_of_merging(models, merged, name, merge):
    from comfyui_toma.toma_core.settings import SettingsError

    model = models[name]
    before = builders.sample(model, **RUN)
    if (name, merge) == ("flux", "attention only") and not attention_hook(model):
        with pytest.raises(SettingsError, match="attention only"):
            merged(model, merge=merge)
        return
    distances = []
    for ratio in (0.25, 0.75):
        patched = merged(model, merge=merge, ratio=ratio, reweight_every=2, reselect_every=4)
        out = builders.sample(patched, **RUN)
        distances.append(((out - before).norm() / before.norm()).item())
        told = report(patched)
        assert told.counts["merged"] >= 4 and told.blocks_merged == told.blocks and flops_saved(told) > 0
    assert 0 < distances[0] < distances[1] < 1.3, distances


@pytest.mark.parametrize("merge", ["whole block", "each layer", "attention only"])
def test_blocks_without_self_attention(patched, merge):
    """Of the upscaler: both attentions of a block read the prompt, which has other tokens than the image."""
    import tiny_models

    def twice(n, context, value, extra_options):
        return 2 * n, context, value

    case = tiny_models.CASES["x4_upscaler"]
    model = tiny_models.build("x4_upscaler").clone()
    model.set_model_attn1_patch(twice) if merge == "whole block" else None
    made = patched("x4_upscaler", model=model, ratio=0.5, merge=merge)
    out = tiny_models.sample(case, made)
    assert torch.isfinite(out).all() and report(made).blocks_merged == report(made).blocks, report(made).sentence()
    assert (out - tiny_models.sample(case, model)).norm() > 0


@pytest.mark.parametrize("preset", ["balanced", "quality", "fast", "turbo", "paper"])
@pytest.mark.parametrize("name,kind", [("flux", "dit"), ("sdxl", "unet")])
def test_presets(models, name, kind, preset):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import PRESETS, resolve

    assert set(PRESETS) == {"balanced", "quality", "fast", "turbo", "paper"}
    patched = patch(models[name], resolve(preset, kind))
    out = builders.sample(patched, **{**RUN, "steps": 12})
    told = report(patched)
    assert torch.isfinite(out).all()
    if (preset, name) == ("paper", "flux"):  # the published 5 + 5 unmerged blocks are more than this model has
        assert any("leaves none of the" in note for note in told.notes)
    else:
        told_why = any(note.startswith("nothing was forecast or merged: ") for note in told.notes)
        assert (told.work_speedup > 1) is bool(told.tokens or told.counts["forecast"]) is not told_why
        assert told.work_speedup > 1 or preset == "quality", "random weights bend more than `quality` takes"


@pytest.mark.parametrize("double", ["0", "1"])
@pytest.mark.parametrize("single", ["0", "1"])
def test_blocks_that_another_node_leaves_out(models, merged, double, single):
    """SkipLayerGuidance evaluates the model a second time with code of its own in the place of some blocks: that pass
    runs in full, and the guidance has its effect."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    run = {**RUN, "steps": 6}
    told = {"double_layers": double, "single_layers": single, "rescaling_scale": 0.0}
    guided = SkipLayerGuidanceDiT.execute(models["flux"], scale=3.0, start_percent=0.0, end_percent=1.0, **told).args[0]
    patched = merged(guided, ratio=RATIO)
    effect = builders.sample(guided, **run) - builders.sample(models["flux"], **run)
    ours = builders.sample(patched, **run) - builders.sample(merged(models["flux"], ratio=RATIO), **run)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), effect.flatten(), dim=0) > 0.3
    assert report(patched).finished and report(patched).tokens
