"""What an entry of the table in tiny_models.py says about its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import builders
import torch


@dataclass(frozen=True)
class Tiny:
    """One model. `config` is what ComfyUI's detection would read off the weights, at tiny sizes."""

    name: str
    kind: str  # class in comfy.supported_models
    config: dict
    shape: tuple = (16, 16, 16)  # latent without batch: C, [frames,] rows, columns; several: a nested latent
    result: tuple | None = None  # shape of what sampling gives back, where the latent format makes it another
    text: int | None = 64  # width of the prompt's tokens
    tokens: int = builders.TEXT_TOKENS
    pooled: int | None = None
    cfg: float = 3.0
    detected: bool = False  # ComfyUI recognises these weights: loaded as UNETLoader does it
    extra: Callable[[Given], dict] | None = None  # more keys of the conditioning
    batch: int = 1  # frames that travel as a batch
    frame_kept: bool = False  # image to video by a noise mask: the first frame is given
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what get_model reads, by name
    shrink: Callable | None = None  # called with the new network: parts whose size is no option


@dataclass(frozen=True)
class Given:
    """What an entry's `extra` may look at: the entry, its latent's shape(s) with batch, and a source of noise."""

    case: Tiny
    shape: tuple
    generator: torch.Generator

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def references(given: Given) -> dict:
    """Reference latents as the node ReferenceLatent adds them: two, the second of another size."""
    *start, rows, columns = given.shape
    return {"reference_latents": [given.noise(*given.shape), given.noise(*start, rows // 2, columns)]}
