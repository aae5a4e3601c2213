"""The LoRA that makes the demo Flux draw in four steps: what ComfyUI's loader makes of it, and where it lands."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import caption_names, held_out_captions

LIMIT = 4 * 10**6
LAYERS = 2 * 10 + 4 * 3 + 2  # linear layers of two double blocks, four single blocks and the last layer
GAINED = 3  # dB, at least
SEED = 500


@pytest.fixture(scope="module")
def loading(comfy):
    from demo_pack import loading

    return loading


@pytest.fixture(scope="module")
def base(loading):
    return loading.load_demo_flux()


@pytest.fixture(scope="module")
def student(loading):
    return loading.load_demo_student()


def draw(loading, model, captions: list[str], steps: int, cfg: float) -> torch.Tensor:
    """Images [B, 128, 128, 3] in 0..1, one batch by ComfyUI's sampler."""
    import comfy.sample

    conds = [loading.encode_prompt(caption)[0] for caption in captions]
    pooled = torch.cat([cond[1]["pooled_output"] for cond in conds])
    positive = [[torch.cat([cond[0] for cond in conds]), {"pooled_output": pooled}]]
    latent = loading.empty_latent(batch_size=len(captions))["samples"]
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    noise = comfy.sample.prepare_noise(latent, SEED)
    run = (noise, steps, cfg, "euler", "simple", positive, loading.encode_prompt(""), latent)
    with torch.inference_mode():
        out = comfy.sample.sample(model, *run, seed=SEED, disable_pbar=True)
    return loading.load_demo_codec(model).decode(out)


def psnr(images: torch.Tensor, wanted: torch.Tensor) -> float:
    return -10 * (images - wanted).square().mean(dim=(1, 2, 3)).log10().mean().item()


def test_held_out_captions_are_captions():
    held_out = held_out_captions()
    assert len(held_out) == 32 and set(held_out) < set(caption_names())
    assert len({name.split()[-1] for name in held_out}) == 8, "over every colour"


def test_file_is_small(loading):
    assert loading.STUDENT_FILE.stat().st_size <= LIMIT


def test_the_loader_node_offers_it(loading):
    from demo_pack import nodes

    assert list(nodes.LOADERS) == ["flux", "sdxl-like unet", "flux, 4 steps"]
    assert nodes.LOADERS["flux, 4 steps"] is loading.load_demo_student


def test_comfyui_takes_every_key(loading, caplog):
    from safetensors import safe_open

    with caplog.at_level(logging.WARNING):
        student = loading.load_demo_student()
    assert not caplog.records, caplog.text
    with safe_open(loading.STUDENT_FILE, "pt") as file:
        named = {key.rpartition(".lora_")[0] + ".weight" for key in file.keys()}  # noqa: SIM118
    assert set(student.patches) == named and len(named) == LAYERS


def test_named_weights_change_and_others_do_not(base, student):
    plain = {name: value.clone() for name, value in base.model.diffusion_model.state_dict().items()}
    student.patch_model()
    try:
        patched = student.model.diffusion_model.state_dict()
        changed = {f"diffusion_model.{name}" for name in plain if not torch.equal(patched[name], plain[name])}
    finally:
        student.unpatch_model()
    assert changed == set(student.patches)


def test_four_steps_land_near_the_teacher(loading, base, student, figure):
    """Captions and noise that the distillation has not seen. The teacher takes 12 steps to keep the test short."""
    captions = held_out_captions()[4::16]
    teacher = draw(loading, base, captions, 12, 2.5)
    with_lora = psnr(draw(loading, student, captions, 4, 1.0), teacher)
    without = psnr(draw(loading, base, captions, 4, 1.0), teacher)
    figure("4-step student", f"{with_lora:.1f} dB from the teacher, {without:.1f} dB without the LoRA")
    assert with_lora > without + GAINED
