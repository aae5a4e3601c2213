"""SDXL and its relatives on ComfyUI's UNetModel.

There is no slot around a UNet's transformer block, so its `forward` is wrapped while a run lasts; the original runs
inside. A row is one spatial transformer.

Attention patches of other nodes (IPAdapter, attention couple, HyperTile, PAG, SAG) may rely on the token
grid: a layer that has one works on all tokens, while the rest of its block stays merged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...evaluation import Block, Counted, Evaluation, Grid
from ...merge import Merge
from ...settings import MergeWhere, Settings
from ..dynamo import has_patches, keep_out_of_graphs, uncompiled
from ..memory import guarded
from .base import KEY, Family


def _transformers(network: nn.Module) -> dict[str, int]:
    """Path of each spatial transformer -> its depth, in running order."""
    found = {}
    for path, module in network.named_modules():
        if hasattr(module, "transformer_blocks") and hasattr(module, "proj_in"):
            found[path] = len(module.transformer_blocks)
    return found


class UNetFamily(Family):
    name = kind = "unet"

    @staticmethod
    def matches(network: nn.Module) -> bool:
        from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

        return isinstance(network, UNetModel)

    @staticmethod
    def why_never(network: nn.Module) -> str:
        """Why no tokens of this network can be merged; nothing if they can."""
        if any(hasattr(module, "time_stack") for module in network.modules()):
            return "its transformers also attend over time"
        return "" if _transformers(network) else "it has no transformer blocks"

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.transformers = _transformers(network)
        self.paths: list[str] = []  # of the blocks, in their order
        self.convolutions = _convolutions(network)

    def arrange(self, settings: Settings) -> UNetFamily:
        family = copy(self)
        family.settings, family.blocks, family.paths = settings, [], []
        for path, depth in self.transformers.items():
            for i in range(depth):
                skipped = len(family.blocks) < settings.skip_first_blocks
                share = path if settings.rides else "unet"
                last = i == depth - 1 or not settings.rides
                row = path if settings.rides else f"{path} {i}"
                family.blocks.append(Block(row, share, i, last, skipped))
                family.paths.append(f"{path}.transformer_blocks.{i}")
        return family

    def install(self, options: dict) -> None:
        keep_out_of_graphs(BlockSeam, FeedForwardSeam, Evaluation, guarded)

    def seams(self, network: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Callable], Callable]]]:
        modules = dict(network.named_modules())
        if any(path not in modules for path in self.paths):  # of a guider with two models
            return
        for block, path in zip(self.blocks, self.paths):
            module: Any = modules[path]
            feed_forward = None
            if self.settings.merge is MergeWhere.LAYER:
                feed_forward = FeedForwardSeam()
                yield module.ff, feed_forward.around
            of_text = ("attn1", "attn2") if getattr(module, "disable_self_attn", False) else ("attn2",)
            yield module, partial(BlockSeam, block, of_text, feed_forward)

    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        return None if x.ndim == 4 else f"the latent has {x.ndim} dimensions instead of 4"

    def label(self, block: Block, grid: Grid) -> str:
        return f"{grid[0]}x{grid[1]}"

    def block_flops(self, block: Block, counted: Counted, after: int) -> float:
        rest = counted.before if self.settings.merge is MergeWhere.ATTENTION else after
        channels, text = counted.channels, counted.text
        self_attention = 4 * after * channels**2 + 2 * after**2 * channels
        cross_attention = 2 * (rest + text) * channels**2 + 2 * rest * text * channels
        return 2.0 * (self_attention + cross_attention + 12 * rest * channels**2)

    def other_flops(self, latent: tuple[int, ...]) -> float:
        height, width = latent[-2:]
        return 2.0 * sum(weights * -(-height // scale) * -(-width // scale) for weights, scale in self.convolutions)


def _convolutions(network: Any) -> list[tuple[int, int]]:
    """(weights, how many latent pixels a side each output pixel stands for) of what lies outside the blocks."""
    found: list[tuple[int, int]] = []
    scale = 1
    middle = [network.middle_block] if network.middle_block is not None else []  # KOALA has none
    for blocks in (network.input_blocks, middle, network.output_blocks, [network.out]):
        for module in (module for block in blocks for module in block.modules()):
            name = type(module).__name__
            scale = scale * 2 if name == "Downsample" else scale // 2 if name == "Upsample" else scale
            if isinstance(module, nn.Conv2d):
                found.append((module.weight.numel(), scale))
    return found


class FeedForwardSeam:
    """A block's feed-forward, which has no hook of its own: merged while its block says so, in that thread."""

    def __init__(self) -> None:
        self.now = threading.local()

    def around(self, original: Callable) -> Callable:
        def forward(x: Tensor) -> Tensor:
            merge: Merge | None = getattr(self.now, "merge", None)
            if merge is None:
                return original(x)
            return guarded(merge.unmerge, original(guarded(merge.merge, x)))

        return forward


class BlockSeam:
    """A transformer block's forward. The keys and values of the layers `of_text` are those of the prompt."""

    def __init__(
        self, block: Block, of_text: tuple[str, ...], feed_forward: FeedForwardSeam | None, original: Callable
    ) -> None:
        self.block = block
        self.of_text = of_text
        self.feed_forward = feed_forward
        self.original = original

    def __call__(self, x: Tensor, context=None, transformer_options={}, **more) -> Tensor:  # noqa: B006 - ComfyUI's signature
        transformer_options = transformer_options or {}
        evaluation: Evaluation | None = transformer_options.get(KEY)
        run: Callable = partial(self._original, context=context, **more)
        shape = transformer_options.get("activations_shape")
        if evaluation is None or shape is None:
            return run(x, transformer_options=transformer_options)
        grid = tuple(shape[2:])
        text = context.shape[1] if isinstance(context, Tensor) else 0
        if evaluation.settings.rides or not evaluation.merges or self.block.skipped:
            tokens, merge = guarded(evaluation.enter, self.block, x, grid, 0, text)
            options = transformer_options if merge is None else self._whole_for_others(transformer_options, merge)
            return guarded(evaluation.leave, self.block, run(tokens, transformer_options=options))
        return self._layers(evaluation, x, grid, text, run, transformer_options)

    def _layers(self, evaluation: Evaluation, x: Tensor, grid: Grid, text: int, run: Callable, options: dict) -> Tensor:
        """Merged inside each layer, after its norm; the residual stream keeps all tokens."""
        merge = guarded(evaluation.merge_for, self.block, x, grid)
        layers = ("attn1",) if evaluation.settings.merge is MergeWhere.ATTENTION else ("attn1", "attn2")
        free = [layer for layer in layers if not _patched(options, layer)]
        try:
            if self.feed_forward is not None:
                self.feed_forward.now.merge = merge
            out = run(x, transformer_options=self._merged_attention(options, merge, free))
        finally:
            if self.feed_forward is not None:
                self.feed_forward.now.merge = None
        evaluation.count(self.block, grid, x.shape[2], x.shape[1], merge.kept.shape[1], text=text)
        return out

    def _original(self, x: Tensor, transformer_options: dict, **arguments) -> Tensor:
        """The block itself. All blocks share one compiled forward, whose guards don't see the options: with
        patches each would run as the first one did, so then it is not compiled."""
        run = partial(uncompiled, self.original) if has_patches(transformer_options) else self.original
        return run(x, transformer_options=transformer_options, **arguments)

    def _whole_for_others(self, options: dict, merge: Merge) -> dict:
        """Options of a merged block in which the patches of other nodes still see all tokens."""
        whole, shorter = merge.unmerge, merge.merge
        for layer in ("attn1", "attn2"):
            if _patched(options, layer):
                widen = _tokens_through(layer in self.of_text, partial(guarded, whole))
                options = _around(options, layer, widen, lambda n, extra_options: guarded(shorter, n), outermost=True)
        middle = options.get("patches", {}).get("middle_patch")
        if middle:

            def on_all(patch):
                return lambda x, extra_options: guarded(shorter, patch(guarded(whole, x), extra_options))

            options = {**options, "patches": {**options["patches"], "middle_patch": [on_all(p) for p in middle]}}
        return options

    def _merged_attention(self, options: dict, merge: Merge, layers: list[str]) -> dict:
        """Options in which these attention layers work on merged tokens."""
        for layer in layers:
            narrow = _tokens_through(layer in self.of_text, partial(guarded, merge.merge))
            widen = lambda n, extra_options: guarded(merge.unmerge, n)  # noqa: E731
            options = _around(options, layer, narrow, widen, outermost=False)
        return options


def _patched(options: dict, layer: str) -> bool:
    """Whether another node has a patch on this layer of the running block."""
    patches = options.get("patches", {})
    if patches.get(f"{layer}_patch") or patches.get(f"{layer}_output_patch"):
        return True
    replaced = options.get("patches_replace", {}).get(layer, {})
    block = options.get("block")
    return block is not None and (block in replaced or (*block, options.get("block_index")) in replaced)


def _around(options: dict, layer: str, before: Callable, after: Callable, outermost: bool) -> dict:
    """Options with a pair of patches around one attention layer, outside or inside those of other nodes."""
    patches = dict(options.get("patches", {}))
    theirs_in, theirs_out = patches.get(f"{layer}_patch", []), patches.get(f"{layer}_output_patch", [])
    patches[f"{layer}_patch"] = [before, *theirs_in] if outermost else [*theirs_in, before]
    patches[f"{layer}_output_patch"] = [*theirs_out, after] if outermost else [after, *theirs_out]
    return {**options, "patches": patches}


def _tokens_through(of_text: bool, change: Callable[[Tensor], Tensor]) -> Callable:
    """An attention patch that changes the tokens; in self-attention keys and values are tokens too."""

    def patch(n: Tensor, context, value, extra_options):
        changed = change(n)
        if of_text:
            return changed, context, value
        keys = changed if context is n else change(context)
        return changed, keys, keys if value is context else change(value)

    return patch
