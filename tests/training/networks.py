"""ComfyUI's Flux and UNet, made trainable: initialised, and nothing changed in place that autograd needs."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn

sys.path.insert(0, os.environ["COMFYUI_PATH"])

from comfy.cli_args import args

args.cpu = True
args.use_pytorch_cross_attention = True

import comfy.ldm.flux.model  # noqa: E402
import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel  # noqa: E402
import comfy.model_management  # noqa: E402
from demo_pack.models import FLUX_CONFIG, UNET_CONFIG  # noqa: E402

comfy.model_management.in_training = True


class _LayerNorm(nn.LayerNorm):
    """ComfyUI's blocks add to their input in place after normalising it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class _Operations:
    Linear, Conv2d, GroupNorm, RMSNorm, LayerNorm = nn.Linear, nn.Conv2d, nn.GroupNorm, nn.RMSNorm, _LayerNorm

    @staticmethod
    def conv_nd(dims: int, *args, **kwargs) -> nn.Conv2d:
        return nn.Conv2d(*args, **kwargs)


def _zero(*modules: nn.Module) -> None:
    for module in modules:
        for param in module.parameters():
            nn.init.zeros_(param)


def flux() -> nn.Module:
    model = comfy.ldm.flux.model.Flux(operations=_Operations, dtype=torch.float32, **FLUX_CONFIG)
    for block in model.double_blocks:
        _zero(block.img_mod.lin, block.txt_mod.lin)
    for block in model.single_blocks:
        _zero(block.modulation.lin)
    _zero(model.final_layer.linear, model.final_layer.adaLN_modulation)
    return model


def unet() -> nn.Module:
    model = openaimodel.UNetModel(operations=_Operations, dtype=torch.float32, **UNET_CONFIG)
    for module in model.modules():
        if isinstance(module, openaimodel.ResBlock):
            _zero(module.out_layers[-1])
        elif isinstance(module, openaimodel.SpatialTransformer):
            _zero(module.proj_out)
    _zero(model.out[-1])
    return model
