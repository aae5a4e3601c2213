"""What an IMAGE input has to be: other nodes may give anything."""

from __future__ import annotations

import torch
from torch import Tensor


def check_pictures(pictures: Tensor, name: str) -> Tensor:
    """pictures [B, H, W, 3] of the input `name`, in main memory, without an alpha channel and without
    values that are no numbers."""
    shape = tuple(getattr(pictures, "shape", ()))
    if len(shape) != 4 or not all(shape) or shape[3] not in (3, 4):
        raise ValueError(
            f"{name} has the shape {list(shape)}: it takes at least one picture [number, height, width, 3 or 4]."
        )
    return torch.nan_to_num(pictures[..., :3].float().cpu(), 0.0, 1.0, 0.0)
