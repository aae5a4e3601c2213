"""What is measured, in groups: one model at one size, with all methods that are compared there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import fullsize

from . import methods, models
from .methods import Method

RATIOS = (0.25, 0.5, 0.75)
OTHER_SIZES = ((768, 768), (1216, 832), (1536, 1536))
PASSING = {640: 2, 1280: 4}  # how much smaller than the latent the token grid of a block is
FLUX_BYTES = {"double": 1.36e9, "single": 0.57e9}  # fp32 weights of a block


@dataclass(frozen=True)
class Group:
    """`scope` is what the model holds: "model", or the width of the one block it has."""

    name: str
    family: str
    build: Callable
    scope: str
    size: fullsize.Size
    methods: list[Method]
    batch: int = 1
    double: int = 0
    single: int = 0

    @property
    def latent_size(self) -> fullsize.Size:
        """The size to sample at, so that a block has the tokens that it has in the whole model at `size`."""
        times = PASSING.get(int(self.scope), 1) if self.scope.isdigit() else 1
        return self.size[0] // times, self.size[1] // times

    def flops(self, method: Method) -> float:
        """About how much one sample costs."""
        ratio, where = method.ratio or 0.0, method.where or "whole block"
        ratio = ratio if method.where else 0.0
        if self.scope.isdigit():
            channels = int(self.scope)
            tokens = self.size[0] * self.size[1] // 64 // PASSING[channels] ** 2
            kept = fullsize.keep_count(tokens, ratio)
            one = fullsize.unet_block(tokens, channels, where, kept).total() + 36 * tokens * channels**2
        elif self.family == "unet":
            one = fullsize.parts("unet", self.size, ratio, where).total()
        else:
            tokens = fullsize.flux_tokens(self.size)
            kept = fullsize.keep_count(tokens, ratio)
            kinds = (("double", self.double), ("single", self.single))
            one = sum(n * fullsize.flux_block(kind, tokens, where, kept).total() for kind, n in kinds)
        full = 0.0 if method.steps == 1 else self.flops(methods.none()) * (method.steps - 1)
        return self.batch * one + full


def _name(model: str, size: fullsize.Size, batch: int = 1) -> str:
    return f"{model} {size[0]}x{size[1]}" + (f" batch {batch}" if batch > 1 else "")


def rivals(family: str) -> list[Method]:
    """What a user would pick instead, on this family."""
    found = [methods.tomesd(ratio) for ratio in RATIOS] + [
        methods.todo(),
        methods.tome_node(),
        methods.hypertile(),
    ]
    if family == "unet":
        found += [methods.hypertile(2), methods.tomesd_attention(0.5)]
    return found


def _main() -> list[Method]:
    ours = [methods.toma(ratio) for ratio in (0.1, *RATIOS)]
    limits = [methods.shorter(ratio) for ratio in RATIOS]
    return [methods.none(), *ours, *limits]


def _presets(family: str) -> list[Method]:
    """The paper's way, and carried detail at each ratio that a preset has."""
    from comfyui_toma.toma_core.settings import PRESETS

    ratios = sorted({by_family[family].ratio for by_family in PRESETS.values() if by_family[family].carries})
    return [methods.paper(family), *(methods.carried(ratio) for ratio in ratios)]


def _few(ratios: tuple[float, ...] = (0.1, 0.5)) -> list[Method]:
    return [methods.none(), *(methods.toma(ratio) for ratio in ratios), methods.shorter(0.5)]


def quick() -> list[Group]:
    """One block of each kind at real width and 1024 px: about 30 TFLOPs in three rounds."""
    ours = [methods.none(), *(methods.toma(ratio) for ratio in RATIOS), *(methods.shorter(r) for r in RATIOS)]
    other = [methods.tomesd(0.5), methods.tomesd_attention(0.5), methods.todo()]
    nodes = [methods.tome_node(), methods.hypertile()]
    compared = [*ours, methods.paper("unet"), methods.carried(0.85), *other, *nodes]
    groups = [_block(channels, fullsize.FULL, compared) for channels in PASSING]
    few = [methods.none(), methods.toma(0.5), methods.shorter(0.5), methods.toma(0.75), *nodes]
    build = partial(models.flux, 1, 1)
    return [*groups, Group("Flux 1+1 blocks", "flux", build, "model", fullsize.FULL, few, 1, 1, 1)]


def _block(channels: int, size: fullsize.Size, compared: list[Method], batch: int = 1) -> Group:
    name = _name(f"SDXL block {channels}", size, batch)
    return Group(name, "unet", partial(models.one_block_unet, channels), str(channels), size, compared, batch)


def full(blocks: tuple[int, int]) -> list[Group]:
    """The whole SDXL UNet, and so many double and single Flux blocks, at all sizes.

    What matters most comes first. SDXL at other sizes is computed from one block of each kind before the whole
    UNet is measured there, which takes long."""
    double, single = blocks
    many, two = partial(models.flux, double, single), partial(models.flux, 1, 1)

    def sdxl(size: fullsize.Size, compared: list[Method], batch: int = 1) -> Group:
        return Group(_name("SDXL", size, batch), "unet", models.unet, "model", size, compared, batch)

    def flux(size: fullsize.Size, compared: list[Method], batch: int = 1) -> Group:
        return Group(_name("Flux 1+1 blocks", size, batch), "flux", two, "model", size, compared, batch, 1, 1)

    small, big, at = (512, 512), (2048, 2048), fullsize.FULL
    name = _name(f"Flux {double}+{single} blocks", at)
    groups = [
        sdxl(at, [*_main(), *_presets("unet"), *rivals("unet")]),
        Group(name, "flux", many, "model", at, _main(), 1, double, single),
        flux(at, [methods.none(), methods.toma(0.5), *_presets("flux"), *rivals("flux")]),
    ]
    others = [(size, _few(), 1) for size in OTHER_SIZES]
    others += [(small, [*_few(), methods.easycache()], 1), (at, _few(), 2), (big, _few((0.5,)), 1)]
    for size, compared, batch in others:
        without_cache = [method for method in compared if method.name != "EasyCache"]
        groups += [_block(channels, size, without_cache, batch) for channels in PASSING]
    for one in (flux, sdxl):
        groups += [one(*other) for other in others]
    return groups


def flux_blocks(memory: float, samples: Iterable[str] = ()) -> tuple[int, int]:
    """Double and single blocks: as many as there are in groups measured earlier, else what fits into `memory`
    bytes with 3 GB left for the tokens, twice as many single as double ones, as in the model."""
    found = [re.match(r"Flux (\d+)\+(\d+) blocks", name) for name in samples]
    earlier = max(((int(m[1]), int(m[2])) for m in found if m), default=(1, 1))
    if earlier > (1, 1):
        return earlier
    pairs = int((memory - 3e9) // (FLUX_BYTES["double"] + 2 * FLUX_BYTES["single"]))
    pairs = min(max(1, pairs), 6)
    return pairs, 2 * pairs
