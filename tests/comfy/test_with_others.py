"""LoRA, ControlNet and the patches of other nodes, before and after ToMA: one result, and each still has its effect."""

from __future__ import annotations

import builders
import models as tiny
import pytest
import setups
import torch
from told import report

RUN = {"width": 128, "height": 128, "steps": 5, "cfg": 2.0}


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
    for order in (lambda: merged(other(model)), lambda: other(merged(model))):
        patched = order()
        outs.append(builders.sample(patched, **RUN))
        assert report(patched).blocks_merged == report(patched).blocks, report(patched).sentence()
    assert (outs[0] - outs[1]).norm() <= 1e-4 * outs[0].norm(), "the order of the nodes matters"
    assert (outs[0] - with_other).norm() < 0.5 * with_other.norm()
    ours = outs[0] - builders.sample(merged(model), **RUN)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), effect.flatten(), dim=0) > 0.5, "its effect is gone"
    assert torch.equal(plain, builders.sample(model, **RUN))


@pytest.mark.parametrize("merge", ["each layer", "attention only"])
@pytest.mark.parametrize("other", [attn1_output, attn1_replace, attn2_replace, attention_couple, hypertile])
def test_other_ways_of_merging_leave_room_for_others(models, merged, other, merge):
    settings = {"merge": merge, "carry_detail": False}
    with_other = builders.sample(other(models["sdxl"]), **RUN)
    out = builders.sample(other(merged(models["sdxl"], **settings)), **RUN)
    assert (out - with_other).norm() < 0.5 * with_other.norm()


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_controlnet_keeps_its_effect(models, merged, name):
    model = models[name]
    positive, negative = setups.control(model, 128, 128)
    plain = builders.sample(model, **RUN)
    effect = builders.sample(model, positive=positive, negative=negative, **RUN) - plain
    patched = merged(model)
    ours = builders.sample(patched, positive=positive, negative=negative, **RUN) - builders.sample(patched, **RUN)
    assert effect.norm() > 1e-3 * plain.norm()
    assert torch.nn.functional.cosine_similarity(ours.flatten(), effect.flatten(), dim=0) > 0.5


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
        with pytest.raises(SettingsError, match="needs a newer ComfyUI"):
            merged(model, merge=merge, carry_detail=False)
        return
    distances = []
    for ratio in (0.25, 0.75):
        patched = merged(model, merge=merge, ratio=ratio, carry_detail=False, reweight_every=2, reselect_every=4)
        out = builders.sample(patched, **RUN)
        distances.append(((out - before).norm() / before.norm()).item())
        told = report(patched)
        assert told.actions == ["RESELECT", "REUSE", "REWEIGHT", "REUSE", "RESELECT"]
        assert told.blocks_merged == told.blocks and told.flops_saved > 0
    assert 0 < distances[0] < distances[1] < 0.8, distances


@pytest.mark.parametrize("preset", ["balanced", "quality", "fast", "paper"])
@pytest.mark.parametrize("name,family", [("flux", "flux"), ("sdxl", "unet")])
def test_presets(models, name, family, preset):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import resolve

    patched = patch(models[name], resolve(preset, family))
    out = builders.sample(patched, **{**RUN, "steps": 12})
    assert torch.isfinite(out).all()
    if (preset, name) != (
        "paper",
        "flux",
    ):  # the published 5 + 5 unmerged blocks are more than this model has
        assert report(patched).tokens


def test_other_models_are_refused_by_name(comfy):
    import comfy.model_patcher
    import comfy.supported_models
    from comfyui_toma.toma_core.patcher import UnsupportedModel, patch
    from comfyui_toma.toma_core.settings import Settings

    config = {
        "in_channels": 16, "patch_size": 2, "depth": 2, "input_size": None, "adm_in_channels": 2048, "qk_norm": None,
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}},
        "num_patches": None, "pos_embed_max_size": 64, "dtype": torch.float32,
    }  # fmt: skip
    model = comfy.supported_models.SD3(config).get_model({}, device=torch.device("cpu"))
    patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="SD3.*SDXL.*Flux"):
        patch(patcher, Settings())


@pytest.mark.parametrize("double", ["0", "1"])
@pytest.mark.parametrize("single", ["0", "1"])
def test_blocks_that_another_node_leaves_out(models, merged, double, single):
    """SkipLayerGuidance evaluates the model a second time without some blocks: the first of a span, or the last, so
    that the span's detail is not all there."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    run = {**RUN, "steps": 6}
    told = {"double_layers": double, "single_layers": single, "rescaling_scale": 0.0}
    guided = SkipLayerGuidanceDiT.execute(models["flux"], scale=3.0, start_percent=0.0, end_percent=1.0, **told).args[0]
    patched = merged(guided, reselect_every=2)
    out, unmerged = builders.sample(patched, **run), builders.sample(guided, **run)
    plain = builders.sample(models["flux"], **run)
    assert (out - unmerged).norm() < (unmerged - plain).norm(), "the guidance has its effect"
    assert report(patched).finished and report(patched).blocks_merged == report(patched).blocks
