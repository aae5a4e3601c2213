"""The demo models and their codec inside ComfyUI, the way nodes and benchmarks use them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT = 24 * 10**6


@pytest.fixture(scope="module")
def loading(comfy):
    from demo_pack import loading

    return loading


@pytest.fixture(scope="module", params=["flux", "unet"])
def model(request, loading):
    return loading.load_demo_flux() if request.param == "flux" else loading.load_demo_unet()


def test_files_are_small(loading):
    assert all(path.stat().st_size <= LIMIT for path in (loading.FLUX_FILE, loading.UNET_FILE))


def test_codec_returns_every_8_bit_picture_unchanged(loading, model):
    codec = loading.load_demo_codec(model)
    picture = torch.randint(0, 256, (2, 32, 48, 3)) / 255
    latent = codec.encode(picture)
    assert latent.shape == (2, model.get_model_object("latent_format").latent_channels, 16, 24)
    assert torch.equal((codec.decode(latent) * 255).round(), (picture * 255).round())


def test_models_draw_through_the_sampler_node(loading, model):
    import nodes

    positive, negative = loading.encode_prompt("fox on blue", 64, 64), loading.encode_prompt("", 64, 64)
    latent = loading.empty_latent(64, 64, batch_size=2)
    (drawn,) = nodes.common_ksampler(model, 1, 2, 2.5, "euler", "simple", positive, negative, latent)
    (picture,) = nodes.VAEDecode().decode(loading.load_demo_codec(model), drawn)
    assert picture.shape == (2, 64, 64, 3) and picture.isfinite().all()
    # Even two steps find the background: the corner is blue.
    assert picture[:, :4, :4].mean(dim=(0, 1, 2)).argmax() == 2


def test_flux_loads_as_any_flux(loading):
    import comfy.model_base
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(loading.FLUX_FILE))
    assert isinstance(model.model, comfy.model_base.Flux)
