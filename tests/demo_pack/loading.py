"""The demo models in ComfyUI's own wrapping.

Benchmarks use these functions in process; nodes.py offers them on the canvas.
"""

from __future__ import annotations

import math
from pathlib import Path

import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models_base
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from torch import Tensor

from . import captions
from .codec import FACTOR, PIXEL_CHANNELS, Codec
from .models import UNET_CONFIG, positions

MODELS = Path(__file__).parent / "models"
FLUX_FILE, UNET_FILE = MODELS / "toma_demo_flux.safetensors", MODELS / "toma_demo_unet.safetensors"
STUDENT_FILE = MODELS / "toma_demo_flux_4step_lora.safetensors"
# Both were trained with most of the noise levels in the upper half at 128 px.
SHIFT = 3.0
LATENT_CHANNELS = 16
PIXELS_PER_TOKEN = 4


class DemoLatent(comfy.latent_formats.LatentFormat):
    latent_channels = PIXEL_CHANNELS
    spacial_downscale_ratio = FACTOR


class DemoUNetConfig(comfy.supported_models_base.BASE):
    unet_extra_config: dict = {}
    sampling_settings = {"shift": SHIFT, "multiplier": 1000}
    latent_format = DemoLatent


class DemoUNet(comfy.model_base.BaseModel):
    """Like SDXL, except that the pooled vector comes with the picture size already in it."""

    def encode_adm(self, **kwargs) -> Tensor | None:
        return kwargs.get("pooled_output")

    def concat_cond(self, **kwargs) -> Tensor:
        noise = kwargs["noise"]
        return positions(*noise.shape[-2:]).to(noise).expand(len(noise), -1, -1, -1)


def load_demo_flux(path: Path = FLUX_FILE) -> ModelPatcher:
    model = comfy.sd.load_diffusion_model(str(path))
    return ModelSamplingSD3().patch(model, SHIFT, multiplier=1.0)[0]


def load_demo_student(lora: Path = STUDENT_FILE) -> ModelPatcher:
    """The demo Flux with the LoRA that makes it draw in 4 Euler steps at cfg 1, scheduler `simple`."""
    model = load_demo_flux()
    return comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0.0)[0]


def load_demo_unet(path: Path = UNET_FILE) -> ModelPatcher:
    weights = comfy.utils.load_torch_file(str(path))
    manage = comfy.model_management
    device, supported = manage.get_torch_device(), DemoUNetConfig.supported_inference_dtypes
    dtype = manage.unet_dtype(supported_dtypes=supported, weight_dtype=comfy.utils.weight_dtype(weights))
    config = DemoUNetConfig(UNET_CONFIG)
    config.set_inference_dtype(dtype, manage.unet_manual_cast(dtype, device, supported))
    model = DemoUNet(config, comfy.model_base.ModelType.FLOW)
    patcher = comfy.model_patcher.CoreModelPatcher(
        model, load_device=device, offload_device=manage.unet_offload_device()
    )
    model.load_model_weights(weights, "", assign=patcher.is_dynamic())
    return patcher


def load_demo_codec(model: ModelPatcher) -> Codec:
    return Codec(model.get_model_object("latent_format"))


def encode_prompt(caption: str, width: int = 128, height: int = 128) -> list:
    """ComfyUI conditioning for "fox on blue"; an empty caption is the negative prompt."""
    pixels = math.sqrt(width * height)
    text, pooled = captions.encode(caption, pixels, pixels / PIXELS_PER_TOKEN)
    return [[text[None], {"pooled_output": pooled[None]}]]


def empty_latent(width: int = 128, height: int = 128, batch_size: int = 1) -> dict[str, Tensor]:
    """For both models: ComfyUI trims an empty latent to the channels that the model has."""
    return {"samples": torch.zeros(batch_size, LATENT_CHANNELS, height // FACTOR, width // FACTOR)}
