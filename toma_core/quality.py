"""How far two images are apart. Images are [H, W, C] or [B, H, W, C] in 0..1.

The measures are taken image by image; of a batch they are the mean.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import conv2d, cosine_similarity


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels: -10 log10 of the mean squared error; inf for equal images."""
    a, b = _batch(a), _batch(b)
    return float((-10 * (a - b).square().mean((1, 2, 3)).log10()).mean())


def ssim(a: Tensor, b: Tensor) -> float:
    """Structural similarity (Wang et al. 2004): Gaussian window of 11 pixels, sigma 1.5, the mean over
    channels and over all windows that lie inside the image. A smaller image gets a smaller window."""
    a, b = (rearrange(_batch(x), "b h w c -> (b c) 1 h w") for x in (a, b))
    side = min(11, *a.shape[-2:])
    bell = torch.exp(-((torch.arange(side, dtype=a.dtype, device=a.device) - (side - 1) / 2) ** 2) / (2 * 1.5**2))
    bell = bell / bell.sum()

    def mean(x: Tensor) -> Tensor:
        return conv2d(conv2d(x, bell.view(1, 1, -1, 1)), bell.view(1, 1, 1, -1))

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    alike = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((alike / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of the channels: [..., H, W, C] -> [..., H, W]"""
    return (a.float() - b.float()).abs().mean(-1)


def embedding_distance(a: Tensor, b: Tensor) -> float:
    """Cosine distance of two images' embeddings [..., D], of any encoder; mean over the rest."""
    return float((1 - cosine_similarity(a.double(), b.double(), dim=-1)).mean())


def _batch(images: Tensor) -> Tensor:
    # fp64: the variances of nearly equal images are small differences of large numbers
    return images.double().reshape(-1, *images.shape[-3:])
