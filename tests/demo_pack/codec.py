"""The demo models' "VAE": pictures to latents of half the side and back, without loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

FACTOR = 2
PIXEL_CHANNELS = 3 * FACTOR * FACTOR


def to_latent(image: Tensor, channels: int) -> Tensor:
    """image [B, 3, H, W] in -1..1 to [B, channels, H/2, W/2]; channels beyond the twelve are zero."""
    latent = F.pixel_unshuffle(image, FACTOR)
    return F.pad(latent, (0, 0, 0, 0, 0, channels - PIXEL_CHANNELS))


def to_image(latent: Tensor) -> Tensor:
    """Undoes to_latent."""
    return F.pixel_shuffle(latent[:, :PIXEL_CHANNELS], FACTOR)


class Codec:
    """Stands in for a VAE in VAEDecode and VAEEncode.

    Images [B, H, W, 3] in 0..1; latents as the model's latent format has them.
    """

    def __init__(self, latent_format) -> None:
        self.latent_format = latent_format
        self.latent_channels = latent_format.latent_channels

    def decode(self, latent: Tensor) -> Tensor:
        image = to_image(self.latent_format.process_in(latent.float()))
        return (image.movedim(1, -1) * 0.5 + 0.5).clamp(0, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        image = pixels[..., :3].movedim(-1, 1).float() * 2 - 1
        height, width = (side // FACTOR * FACTOR for side in image.shape[-2:])
        return self.latent_format.process_out(to_latent(image[..., :height, :width], self.latent_channels))

    def spacial_compression_encode(self) -> int:
        return FACTOR

    def spacial_compression_decode(self) -> int:
        return FACTOR
