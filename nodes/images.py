"""What an IMAGE input has to be: other nodes may give anything. And images as files for the page."""

from __future__ import annotations

import torch
from comfy_api.latest import ui
from torch import Tensor

MOST_SHOWN = 32  # of a long video the page gets every n-th frame


def check_images(images: Tensor, name: str) -> Tensor:
    """images [B, H, W, 3] of the input `name`, in main memory, without an alpha channel and without values that are no
    numbers."""
    shape = tuple(getattr(images, "shape", ()))
    if len(shape) != 4 or not all(shape) or shape[3] not in (3, 4):
        raise ValueError(
            f"{name} has the shape {list(shape)}: it takes at least one image [number, height, width, 3 or 4]."
        )
    return torch.nan_to_num(images[..., :3].float().cpu(), 0.0, 1.0, 0.0)


def shown_images(count: int) -> list[int]:
    """Which of `count` images the page gets: all of a few, else spread over all, the first and the last included."""
    if count <= MOST_SHOWN:
        return list(range(count))
    return [round(i * (count - 1) / (MOST_SHOWN - 1)) for i in range(MOST_SHOWN)]


def as_files(images: Tensor, cls) -> list[dict]:
    """Temporary files that the page can ask for."""
    return ui.PreviewImage(images, cls=cls).as_dict()["images"]
