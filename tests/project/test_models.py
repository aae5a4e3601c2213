"""The tiny models behave like the real ones where it matters to the other tests."""

import pytest


@pytest.fixture(scope="module")
def models(comfy, tmp_path_factory):
    import builders

    folder = tmp_path_factory.mktemp("models")
    return {
        "flux": builders.tiny_flux(folder / "tiny_flux.safetensors"),
        "sdxl": builders.tiny_sdxl(),
        "sd15": builders.tiny_sd15(),
    }


@pytest.mark.parametrize("family", ["flux", "sdxl", "sd15"])
def test_samples_are_finite_repeatable_and_follow_seed_and_prompt(models, family):
    import builders
    import torch

    model = models[family]
    first = builders.sample(model, 128, 64)
    assert first.shape[-2:] == (8, 16)
    assert torch.isfinite(first).all()
    assert first.std() > 0.05
    assert torch.equal(first, builders.sample(model, 128, 64))
    assert not torch.allclose(first, builders.sample(model, 128, 64, seed=1), atol=1e-2)
    other_prompt = builders.conditioning(model, seed=9)
    assert not torch.allclose(first, builders.sample(model, 128, 64, positive=other_prompt), atol=1e-3)


def test_classes_are_comfyuis_own(models):
    import comfy.model_base

    assert type(models["flux"].model) is comfy.model_base.Flux
    assert type(models["sdxl"].model) is comfy.model_base.SDXL


def test_sdxl_has_attention_at_two_resolutions(models):
    from comfy.ldm.modules.attention import SpatialTransformer

    depths = {}
    for name, module in models["sdxl"].model.diffusion_model.named_modules():
        if isinstance(module, SpatialTransformer):
            depths.setdefault(module.in_channels, set()).add(len(module.transformer_blocks))
            assert module.transformer_blocks[0].attn2 is not None, name
    assert depths == {64: {2}, 128: {3}}


def test_attention_is_sdpa(comfy):
    from comfy.ldm.modules import attention

    assert attention.optimized_attention is attention.attention_pytorch
