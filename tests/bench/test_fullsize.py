"""The counted FLOPs against torch's counter on ComfyUI's own classes (meta tensors), and what is known of them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import fullsize
from torch.utils.flop_counter import FlopCounterMode

SIZES = [(1216, 832)]  # neither square nor a multiple of all strides


def counted(network, *inputs, **named) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(*inputs, **named)
    return counter.get_total_flops()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_unet(comfy, size):
    from speedlib import models

    network = models.unet(device="meta").model.diffusion_model
    latent = torch.empty(1, 4, size[1] // 8, size[0] // 8, device="meta")
    text = torch.empty(1, fullsize.SDXL_TEXT, fullsize.SDXL_CONTEXT, device="meta")
    pooled, time = torch.empty(1, fullsize.SDXL_POOLED, device="meta"), torch.empty(1, device="meta")
    assert counted(network, latent, time, text, y=pooled) == fullsize.parts("unet", size).total()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_flux(comfy, size):
    from speedlib import models

    network = models.flux(1, 1, device="meta").model.diffusion_model
    latent = torch.empty(1, 16, size[1] // 8, size[0] // 8, device="meta")
    text = torch.empty(1, fullsize.FLUX_TEXT, fullsize.FLUX_CONTEXT, device="meta")
    pooled, time = torch.empty(1, fullsize.FLUX_POOLED, device="meta"), torch.empty(1, device="meta")
    total = fullsize._flux_outside(size)
    for kind in ("double", "single"):
        total += fullsize.flux_block(kind, fullsize.flux_tokens(size))
    assert counted(network, latent, time, text, y=pooled, guidance=time) == total.total()


def test_known_shares_of_sdxl():
    counted = fullsize.parts("unet")
    assert fullsize.share(counted, "convolutions") == pytest.approx(0.24, abs=0.005)
    assert fullsize.share(counted, "blocks of 640") == pytest.approx(0.155, abs=0.002)
    assert fullsize.share(counted, "blocks of 1280") == pytest.approx(0.594, abs=0.002)
    assert fullsize.share(counted, "blocks of 1280: feed-forward") == pytest.approx(0.36, abs=0.005)


@pytest.mark.parametrize(
    ("family", "ratio", "known"),
    [
        ("unet", 0.5, 1.66),
        ("unet", 0.75, 2.36),
        ("flux", 0.25, 1.27),
        ("flux", 0.5, 1.69),
        ("flux", 0.75, 2.42),
    ],
)
def test_known_ideals(family, ratio, known):
    assert fullsize.ideal(family, ratio) == pytest.approx(known, abs=0.01)


def test_attention_only_is_not_worth_it():
    assert fullsize.ideal("unet", 0.5, where="attention only") == pytest.approx(1.18, abs=0.01)


def settings_of(**changes):
    from comfyui_toma.toma_core.settings import Settings

    return Settings(**changes)


@pytest.mark.parametrize("family", ["unet", "flux"])
def test_a_merged_evaluation_rides(comfy, family):
    share = fullsize.merged_share(family, settings_of(ratio=0.5, tile_size=8))
    ideal = 1 / fullsize.ideal(family, 0.5, skip=0)
    assert ideal < share < 1.01 * ideal  # giving back costs next to nothing
    each = settings_of(ratio=0.5, tile_size=8, merge="each layer", skip_first_blocks=0)
    assert fullsize.merged_share(family, each) > share


def test_the_paper_leaves_the_first_blocks_of_flux_alone(comfy):
    from comfyui_toma.toma_core.settings import PRESETS

    paper = PRESETS["paper"]["dit"]
    assert fullsize.merged_total("flux", paper, merging=False) == fullsize.parts("flux", ratio=0.5).total()


def test_nothing_merged_costs_what_it_did(comfy):
    assert fullsize.merged_total("unet", settings_of(ratio=0.0), merging=False) == fullsize.parts("unet").total()
