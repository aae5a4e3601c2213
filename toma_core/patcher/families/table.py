"""The diffusion transformers whose tokens can be merged: one entry a model.

A new model is one entry here and one line in the tests' table (CONTRIBUTING.md shows it on an example).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...clean import Patch


@dataclass(frozen=True)
class Sequence:
    """What is known of the sequence that a block gets, as if nothing were merged: its length, how many of it are image
    tokens, and how many text tokens the blocks before had apart (None: none did)."""

    length: int
    image: int
    text: int | None
    options: dict
    inputs: dict


@dataclass(frozen=True)
class Stream:
    """One list of blocks, and how its blocks get their tokens.

    blocks: where the list is in the network. slot: its kind in patches_replace["dit"]; without one the blocks' forward
    is wrapped. image, text: the arguments with image tokens [B, L, C] and with a text apart. start: where in their
    sequence the image tokens begin. rows: arguments with a row for each token, and in which dimension. masks: attention
    masks. per_frame: arguments with a row for each frame of a video. out: where the image is in what a block's forward
    gives, if that is a tuple. crosses: the text is attended to by cross-attention. of_text, per_image: parts of the names
    of layers that only text tokens meet, and of those that run once an image (modulation)."""

    blocks: str
    slot: str = ""
    image: str = "img"
    text: str = ""
    start: Callable[[Sequence], int | None] = field(default=lambda seen: 0)
    rows: Mapping[str, int] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    per_frame: tuple[str, ...] = ()
    out: int | None = None
    crosses: bool = False
    of_text: tuple[str, ...] = ()
    per_image: tuple[str, ...] = ("mod", "adaLN")

    def __hash__(self) -> int:
        return hash(self.blocks)

    @property
    def kind(self) -> str:
        return self.slot.removesuffix("_block") or self.blocks

    def image_of(self, out: Any) -> Tensor:
        if self.slot:
            return out["img"]
        return out if self.out is None else out[self.out]

    def with_image(self, out: Any, image: Tensor) -> Any:
        if self.slot:
            return {**out, "img": image}
        if self.out is None:
            return image
        return tuple(image if i == self.out else part for i, part in enumerate(out))


def _never(x: Tensor, options: dict, inputs: dict) -> str | None:
    return None


@dataclass(frozen=True)
class Entry:
    """One model. network: module and class; a subclass counts, too. patch: frames, rows and columns of the latent in a
    token. why_not: why a call can't be merged, or None. wraps_patches: whether `double_block` patches of other nodes get
    the image tokens by the name of `img`, first in the sequence."""

    name: str
    network: str
    streams: tuple[Stream, ...]
    patch: Callable[[nn.Module], Patch]
    why_not: Callable[[Tensor, dict, dict], str | None] = _never
    wraps_patches: bool = False


# --------------------------------------------------------------------------- where image tokens begin


def _after_text(seen: Sequence) -> int | None:
    """Text, image, references: as many text tokens as the blocks before had, or as ComfyUI says."""
    return seen.text if seen.text is not None else _img_slice(seen)


def _img_slice(seen: Sequence) -> int | None:
    found = seen.options.get("img_slice")
    return found[0] if found else None


def _last(seen: Sequence) -> int:
    return seen.length - seen.image


# --------------------------------------------------------------------------- patches


def _square(attribute: str = "patch_size") -> Callable[[nn.Module], Patch]:
    def patch(network: nn.Module) -> Patch:
        found = getattr(network, attribute)
        sides = tuple(found) if isinstance(found, (tuple, list)) else (found, found)
        return (1, *sides) if len(sides) == 2 else (sides[0], sides[1], sides[2])

    return patch


# --------------------------------------------------------------------------- what can't be merged


def _flux_why_not(x: Tensor, options: dict, inputs: dict) -> str | None:
    if x.ndim != 4:
        return f"the latent has {x.ndim} dimensions instead of 4"
    return _timestep_zero(x, options, inputs)


def _timestep_zero(x: Tensor, options: dict, inputs: dict) -> str | None:
    if inputs.get("ref_latents") is not None and inputs.get("ref_latents_method") == "index_timestep_zero":
        return "reference latents with a timestep of zero are modulated by token ranges"
    return None


# --------------------------------------------------------------------------- the table

_TEXT = ("txt_",)
_DOUBLE = Stream("double_blocks", "double_block", text="txt", rows={"pe": 2}, masks=("attn_mask",), of_text=_TEXT)
_SINGLE = Stream("single_blocks", "single_block", start=_after_text, rows={"pe": 2}, masks=("attn_mask",))

ENTRIES: list[Entry] = [
    Entry("flux", "comfy.ldm.flux.model:Flux", (_DOUBLE, _SINGLE), _square(), _flux_why_not),
    Entry("chroma", "comfy.ldm.chroma.model:Chroma", (_DOUBLE, _SINGLE), _square(), _flux_why_not),
]


def entry_of(network: nn.Module) -> Entry | None:
    """The entry of a network's class or of one that it derives from, if its blocks are where they should be."""
    for entry in ENTRIES:
        module, _, name = entry.network.partition(":")
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(network, kind):
            there = all(hasattr(network, stream.blocks.split(".")[0]) for stream in entry.streams)
            return entry if there else None
    return None
