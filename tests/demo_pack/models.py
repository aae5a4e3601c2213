"""The two demo networks: ComfyUI's own classes at small sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .captions import CONTEXT_DIM, POOLED_DIM
from .codec import PIXEL_CHANNELS

# What ComfyUI reads off the weights when it loads the file (comfy/model_detection.py).
FLUX_CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "hidden_size": 256,
    "num_heads": 2,
    "axes_dim": [16, 56, 56],
    "mlp_ratio": 4.0,
    "theta": 10000,
    "qkv_bias": True,
    "depth": 2,
    "depth_single_blocks": 4,
    "context_in_dim": CONTEXT_DIM,
    "vec_in_dim": POOLED_DIM,
    "guidance_embed": False,
    "txt_ids_dims": [],
}

POSITION_CHANNELS = 8


def positions(height: int, width: int) -> Tensor:
    """Where each latent pixel lies, as two slow waves along each side, [POSITION_CHANNELS, height, width].

    Real SDXL has learned to count from the padding at the borders. That takes longer than we train, so the
    small UNet gets its place as extra input channels, the way inpainting models get their mask.
    """
    y, x = ((torch.arange(n) + 0.5) / n * math.pi for n in (height, width))
    y, x = torch.stack([y, 2 * y]), torch.stack([x, 2 * x])
    rows = torch.cat([y.sin(), y.cos()])[:, :, None].expand(-1, -1, width)
    columns = torch.cat([x.sin(), x.cos()])[:, None, :].expand(-1, height, -1)
    return torch.cat([rows, columns])


# SDXL's shape: no attention at full resolution, depth 2 at half, deeper at a quarter.
UNET_CONFIG: dict[str, Any] = {
    "image_size": 64,
    "in_channels": PIXEL_CHANNELS + POSITION_CHANNELS,
    "out_channels": PIXEL_CHANNELS,
    "model_channels": 64,
    "channel_mult": (1, 2, 2),
    "num_res_blocks": [1, 1, 1],
    "transformer_depth": [0, 2, 3],
    "transformer_depth_middle": 3,
    "transformer_depth_output": [0, 0, 2, 2, 3, 3],
    "num_head_channels": 64,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
    "context_dim": CONTEXT_DIM,
    "adm_in_channels": POOLED_DIM,
    "num_classes": "sequential",
}
