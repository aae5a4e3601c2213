"""Training pictures: Fluent 3D emoji over plain colours, from npm @lobehub/fluent-emoji-3d (MIT)."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from demo_pack.captions import COLOURS, SUBJECTS
from downloads import fetched, from_npm
from PIL import Image
from torch import Tensor

PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0"
ARCHIVE = "lobehub-fluent-emoji-3d-1.1.0.tgz"
SIZES = (32, 64, 128, 256)


def caption_names() -> list[str]:
    return [f"{subject} on {colour}" for subject in SUBJECTS for colour in COLOURS]


def held_out_captions() -> list[str]:
    """32 of the 512 captions, of 32 subjects and over all colours: the distillation never sees these."""
    return [name for i, name in enumerate(caption_names()) if (i // len(COLOURS) + i) % 16 == 0]


def _premultiplied(picture: Image.Image) -> np.ndarray:
    """RGBA floats in 0..1 [H, W, 4], colours times alpha, so that shrinking leaves no dark fringe."""
    rgba = np.asarray(picture.convert("RGBA"), dtype=np.float32) / 255
    return np.concatenate([rgba[..., :3] * rgba[..., 3:], rgba[..., 3:]], axis=-1)


class Emoji:
    """All subjects at all training sizes; `batch` composes them over colours."""

    def __init__(self, folder: Path):
        self.subjects = list(SUBJECTS)
        self.colours = list(COLOURS)
        self.backgrounds = torch.tensor(list(COLOURS.values()), dtype=torch.float32) / 255
        with tarfile.open(fetched(folder, ARCHIVE, from_npm(PACKAGE))) as archive:
            pictures = [self._read(archive, code) for code in SUBJECTS.values()]
        full = torch.stack(pictures)  # [S, 4, 256, 256]
        self.pictures = {size: torch.nn.functional.adaptive_avg_pool2d(full, size) for size in SIZES}

    @staticmethod
    def _read(archive: tarfile.TarFile, code: str) -> Tensor:
        picture = Image.open(io.BytesIO(archive.extractfile(f"package/assets/{code}.webp").read()))
        rgba = torch.from_numpy(_premultiplied(picture)).permute(2, 0, 1)
        return torch.nn.functional.interpolate(rgba[None], (256, 256), mode="area")[0]

    def compose(self, subjects: Tensor, colours: Tensor, size: int) -> Tensor:
        """Pictures [B, 3, size, size] in -1..1 of subjects [B] over colours [B]."""
        rgba = self.pictures[size][subjects]
        over = rgba[:, :3] + (1 - rgba[:, 3:]) * self.backgrounds[colours][:, :, None, None]
        return over * 2 - 1
