"""SDXL and Flux at their real widths, with random weights: speed does not depend on them."""

from __future__ import annotations

import math

import fullsize
import torch

SDXL = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "legacy": False,
    "use_spatial_transformer": True, "use_temporal_attention": False, "use_linear_in_transformer": True,
    "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10,
    "context_dim": fullsize.SDXL_CONTEXT, "num_classes": "sequential", "adm_in_channels": fullsize.SDXL_POOLED,
}  # fmt: skip

FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": fullsize.FLUX_POOLED,
    "context_in_dim": fullsize.FLUX_CONTEXT, "hidden_size": fullsize.FLUX_HIDDEN, "mlp_ratio": 4.0,
    "num_heads": 24, "depth": fullsize.FLUX_DOUBLE, "depth_single_blocks": fullsize.FLUX_SINGLE,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
    "txt_ids_dims": [],
}  # fmt: skip


def one_row_unet(channels: int, depth: int):
    """A ModelPatcher around a UNet of one resolution: one res block and one spatial transformer of this width, as deep
    as SDXL's. The way up, which would cost more than both, only drops what the skip connections bring."""
    config = {
        **SDXL, "model_channels": channels, "num_res_blocks": [1], "channel_mult": [1], "transformer_depth": [depth],
        "transformer_depth_output": [0, 0], "transformer_depth_middle": -2,
    }  # fmt: skip
    model = unet(config)
    for block in model.model.diffusion_model.output_blocks:
        block[0] = _Drop(channels)
    return model


class _Drop(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : self.channels]


def unet(config: dict = SDXL, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """A ModelPatcher around comfy.model_base.SDXL."""
    import comfy.supported_models

    return _patcher(comfy.supported_models.SDXL, config, dtype, device)


def flux(double: int, single: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """A ModelPatcher around comfy.model_base.Flux with so many blocks of each kind."""
    import comfy.supported_models

    config = {**FLUX, "depth": double, "depth_single_blocks": single}
    return _patcher(comfy.supported_models.Flux, config, dtype, device)


def _patcher(kind: type, config: dict, dtype: torch.dtype, device: str):
    import comfy.model_patcher

    model_config = kind({**config, "dtype": dtype})
    model = model_config.get_model({}, device=torch.device("meta"))
    if device != "meta":
        _fill(model.diffusion_model.to_empty(device=device))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, cpu, cpu)


def _fill(network: torch.nn.Module) -> None:
    """Weights that keep activations near 1. Drawing billions of them takes minutes, so a few are repeated."""
    drawn = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for name, weight in network.named_parameters():
        weight.requires_grad_(False)
        if weight.ndim == 1:
            weight.fill_(1.0 if name.endswith(("weight", "scale")) else 0.0)
            continue
        flat = weight.view(-1)
        scaled = (drawn / math.sqrt(math.prod(weight.shape[1:]))).to(weight.dtype)
        for start in range(0, flat.numel(), scaled.numel()):
            part = flat[start : start + scaled.numel()]
            part.copy_(scaled[: part.numel()])
