"""The counted FLOPs against torch's counter on ComfyUI's own classes (meta tensors), and what is known of them."""

import sys
from pathlib import Path
from types import SimpleNamespace

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


def run_of(**changes):
    from comfyui_toma.toma_core.settings import Settings

    return Settings(**changes)


def test_a_run_that_carries_detail_is_unmerged_where_it_picks(comfy):
    each = fullsize.ideal("unet", 0.5)
    settings = run_of(ratio=0.5, reselect_every=4)
    speedup = fullsize.speedup_by_flops("unet", settings, 20, merging=False)
    assert speedup == pytest.approx(1 / (0.25 + 0.75 / each))
    assert fullsize.speedup_by_flops("unet", settings, 20) < speedup


def test_a_run_merged_at_every_step(comfy):
    settings = run_of(ratio=0.5, carry_detail=False, end_percent=0.6)
    speedup = fullsize.speedup_by_flops("flux", settings, 10, merging=False)
    assert speedup == pytest.approx(1 / (0.4 + 0.6 / fullsize.ideal("flux", 0.5)))


def test_nothing_merged_is_no_faster():
    leave = SimpleNamespace(value="leave")
    settings = SimpleNamespace(
        ratio=0.5, tile_size=8, merge=SimpleNamespace(value="whole block"), carries=False, skip_first_blocks=-1,
        schedule=SimpleNamespace(table=lambda steps: [leave] * steps),
    )  # fmt: skip
    assert fullsize.speedup_by_flops("unet", settings, 8) == 1.0
