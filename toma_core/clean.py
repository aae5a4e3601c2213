"""Merging in the space of clean estimates, for networks whose kept tokens ride through all blocks.

A token that was not computed can't take another one's velocity: it has noise of its own. But tokens that show the same
thing have the same clean estimate x0, so what the kept ones tell is how x0 has changed since the last evaluation:

    x0_i = last x0_i + U (x0_kept - last x0_kept)

and the velocity (x_i - x0_i) / sigma that the sampler derives from it removes each token's own noise.
"""

from __future__ import annotations

from math import ceil

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .merge import Merge

Patch = tuple[int, int, int]  # frames, rows and columns of the latent in one token


def grid_of(latent: tuple[int, ...], patch: Patch) -> tuple[int, int]:
    """Rows and columns of the token grid of a latent [..., (T), H, W]; the frames of a video lie below one another."""
    frames, height, width = _sides(latent)
    return ceil(frames / patch[0]) * ceil(height / patch[1]), ceil(width / patch[2])


def tokens_of(latent: Tensor, patch: Patch) -> Tensor:
    """[B, C, (T), H, W] -> [B, N, C * patch]; sides that are no multiple of the patch are padded."""
    x = latent if latent.ndim == 5 else latent.unsqueeze(2)
    missing = [(-side) % part for side, part in zip(x.shape[2:], patch)]
    x = F.pad(x, (0, missing[2], 0, missing[1], 0, missing[0]), mode="replicate") if any(missing) else x
    f, p, q = patch
    return rearrange(x, "b c (t f) (h p) (w q) -> b (t h w) (c f p q)", f=f, p=p, q=q)


def latent_of(tokens: Tensor, latent: Tensor, patch: Patch) -> Tensor:
    """[B, N, C * patch] -> the shape of `latent`: the inverse of `tokens_of`."""
    frames, height, width = _sides(tuple(latent.shape))
    f, p, q = patch
    t, h = ceil(frames / f), ceil(height / p)
    x = rearrange(tokens, "b (t h w) (c f p q) -> b c (t f) (h p) (w q)", t=t, h=h, f=f, p=p, q=q)
    return x[:, :, :frames, :height, :width].reshape(latent.shape)


def unmerged(clean: Tensor, last: Tensor, merge: Merge) -> Tensor:
    """The clean estimates of all tokens [B, N, c]: of the kept ones as computed, those of `clean`; of the others their
    `last` one, changed as the kept ones have changed."""
    return merge.residual(last, merge.take(clean) - merge.take(last))


def _sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return (shape[-3] if len(shape) == 5 else 1), shape[-2], shape[-1]
