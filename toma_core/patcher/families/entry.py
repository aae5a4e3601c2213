"""What an entry of the table says: where the blocks of a network are, and what their arguments are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

from torch import Tensor, nn

from ...clean import Patch


@dataclass(frozen=True)
class Call:
    """One call of the network, as ComfyUI makes it: latent x, transformer_options, and what else it is given."""

    network: Any  # an nn.Module
    x: Tensor
    options: dict
    inputs: dict


@dataclass(frozen=True)
class Layout:
    """What is known of the sequence that a block gets, as if nothing were merged: its length, how many of it are image
    tokens, and how many text tokens the blocks before had apart (None: none did)."""

    length: int
    image: int
    text: int | None
    network: Any  # an nn.Module
    options: dict
    inputs: dict


def first(seen: Layout) -> int | None:
    """The image comes first."""
    return 0


@dataclass(frozen=True)
class Stream:
    """One list of blocks, and how its blocks get their tokens.

    blocks      where the list is in the network
    slot        its kind in patches_replace["dit"]; without one the blocks' forward is wrapped
    image       the argument with the image tokens [B, L, C], or [B, T, H, W, C]
    text        the argument with text tokens apart
    start       where in the sequence the image begins
    rows        arguments with a row for each token -> the dimension in which they lie
    tuples      whether they may be tuples of tensors with such rows
    text_first  whether rows of a text apart come before those of the image
    masks       attention masks, [..., L, L] or [..., 1, L]
    per_frame   arguments with a row for each frame of a video -> how many dimensions they have if so
    bounds      arguments with places in the sequence: one, or a list of (begin, end, ...)
    alone       arguments that must be None for tokens to be merged
    out         where the image is in what the forward gives, if that is a tuple
    side        blocks with tokens of their own, in the order of the image's, that are added to it between blocks

    For the count of FLOPs:
    crosses     the text is attended to by cross-attention
    of_text     parts of the names of layers that only text tokens meet
    per_image   the same of layers that run once an image
    image_only  an attention among image tokens alone that some blocks have besides
    """

    blocks: str
    slot: str = ""
    image: str = "img"
    text: str = ""
    start: Callable[[Layout], int | None] = first
    rows: Mapping[str, int] = field(default_factory=dict)
    tuples: bool = False
    text_first: bool = True
    masks: tuple[str, ...] = ()
    per_frame: Mapping[str, int] = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    out: int | None = None
    side: bool = False
    crosses: bool = False
    of_text: tuple[str, ...] = ()
    per_image: tuple[str, ...] = ("mod", "adaLN", "adaln", "norm")
    image_only: str = ""

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


def no_reason(call: Call) -> str | None:
    return None


def square(attribute: str = "patch_size") -> Callable[[Any], Patch]:
    """The patch that a network names in an attribute: a side, two sides, or frames and two sides."""

    def patch(network: nn.Module) -> Patch:
        found = getattr(network, attribute)
        sides = tuple(found) if isinstance(found, (tuple, list)) else (found, found)
        return (1, *sides) if len(sides) == 2 else (sides[0], sides[1], sides[2])

    return patch


def cell(network: nn.Module) -> Patch:
    """Each cell of the latent is a token."""
    return 1, 1, 1


@dataclass(frozen=True)
class Entry:
    """One model, or several with blocks alike.

    networks    "module:Class", ComfyUI's own. A class that another pack derives from one of them counts, too
    streams     its lists of blocks, in running order
    patch       frames, rows and columns of the latent in a token
    why_not     why a call can't be merged, or None
    double_block_patches   patches of that name get the image tokens as `img`, first in the sequence
    attention_patches      attn1_patch is called in the way of Flux
    """

    name: str
    networks: tuple[str, ...]
    streams: tuple[Stream, ...]
    patch: Callable[[Any], Patch] = square()
    why_not: Callable[[Call], str | None] = no_reason
    double_block_patches: bool = False
    attention_patches: bool = False


# --------------------------------------------------------------------------- where image tokens begin


def at_end(seen: Layout) -> int | None:
    return seen.length - seen.image


def after_text(seen: Layout) -> int | None:
    """Text, image, references: as many text tokens as the blocks before had, or as ComfyUI says."""
    return seen.text if seen.text is not None else img_slice(seen)


def img_slice(seen: Layout) -> int | None:
    found = seen.options.get("img_slice")
    return found[0] if found else None


def img_slice_or_end(seen: Layout) -> int | None:
    """Text, image, references. Releases that know no references give no img_slice, and the image is last."""
    return img_slice(seen) if "img_slice" in seen.options else at_end(seen)


def before_padding(seen: Layout) -> int | None:
    """Last, but padded to a multiple of some length."""
    multiple = getattr(seen.network, "pad_tokens_multiple", None) or 1
    return seen.length - ceil(seen.image / multiple) * multiple


def after_reference(seen: Layout) -> int | None:
    """Behind the frames of Wan's `reference_latent` [B, C, (T), H, W]."""
    reference = seen.inputs.get("reference_latent")
    if reference is None:
        return 0
    patch = seen.network.patch_size[3 - (reference.ndim - 2) :]
    return prod(ceil(side / part) for side, part in zip(reference.shape[2:], patch))


def after_embedded_reference(seen: Layout) -> int | None:
    return after_reference(seen) if getattr(seen.network, "ref_conv", None) is not None else 0
