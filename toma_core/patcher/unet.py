"""SDXL and its relatives on ComfyUI's UNetModel.

There is no slot around a UNet's transformer block, so its `forward` is an object patch, which the
ModelPatcher puts on for a run and takes off again; the original forward runs inside. Outside of a ToMA run
the patch passes straight through.

Attention patches of other nodes (IPAdapter, attention couple, HyperTile, PAG, SAG) may rely on the token
grid: a layer that has one works on all tokens, while the rest of its block stays merged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..merge import Merge
from ..schedule import Action
from ..settings import MergeWhere, Settings
from .call import Call, Grid, Place
from .compiled import has_patches, keep_out_of_graphs, uncompiled
from .detail import finite, samples
from .memory import ours, raise_unless_out_of_memory
from .run import KEY, Family, network_of


def _transformers(diffusion_model) -> dict[str, int]:
    """Path of each spatial transformer -> its depth, in running order; none if it also attends over time."""
    found = {}
    for path, module in diffusion_model.named_modules():
        if hasattr(module, "time_stack"):
            return {}
        if hasattr(module, "transformer_blocks") and hasattr(module, "proj_in"):
            found[path] = len(module.transformer_blocks)
    return found


class UNetFamily(Family):
    name = "unet"
    coarse = True  # 0.3 dB further from the unmerged picture (tests/bench/FINDINGS.md) for half the memory
    description = "SDXL and its relatives on the same UNet (SD1.5, SD2, refiner, SSD-1B, Vega)"

    @staticmethod
    def matches(network) -> bool:
        from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

        return isinstance(network, UNetModel) and bool(_transformers(network))

    def __init__(self, model, settings: Settings) -> None:
        self.settings = settings
        self.places = []
        self.paths: dict[Place, str] = {}
        for path, depth in _transformers(network_of(model)).items():
            for i in range(depth):
                skipped = max(0, settings.skip_first_blocks - len(self.places) + i)
                share = path if settings.carries else "unet"
                place = Place(path, share, i, first=i == skipped, last=i == depth - 1, skipped=i < skipped)
                self.places.append(place)
                self.paths[place] = f"diffusion_model.{path}.transformer_blocks.{i}"

    def apply(self, model) -> None:
        """Puts the seams on a patcher, which must be a clone."""
        for path in self.paths.values():
            feed_forward = None
            if self.settings.merge is MergeWhere.LAYER:
                feed_forward = _seam(model, f"{path}.ff.forward", FeedForwardSeam)
            _seam(model, f"{path}.forward", BlockSeam, path, feed_forward)

    def forget(self, model) -> None:
        """Takes the seams off a patcher that was copied for another device: they call the first one's blocks."""
        for path in self.paths.values():
            model.object_patches.pop(f"{path}.forward", None)
            model.object_patches.pop(f"{path}.ff.forward", None)

    def install(self, options: dict) -> None:
        keep_out_of_graphs(BlockSeam, FeedForwardSeam, Call, finite, samples)
        options[f"{KEY}_blocks"] = {self.paths[place]: place for place in self.places}

    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        return None if x.ndim == 4 else f"the latent has {x.ndim} dimensions instead of 4"

    def label(self, place: Place, grid: Grid) -> str:
        return f"{grid[0]}x{grid[1]}"

    def block_flops(
        self, place: Place, before: int, after: int, channels: int, text: int, beside: int
    ) -> float:
        rest = before if self.settings.merge is MergeWhere.ATTENTION else after
        self_attention = 4 * after * channels**2 + 2 * after**2 * channels
        cross_attention = 2 * (rest + text) * channels**2 + 2 * rest * text * channels
        return 2.0 * (self_attention + cross_attention + 12 * rest * channels**2)


def _seam(model, path: str, kind: type, *args):
    original = model.get_model_object(path)
    if isinstance(original, kind):  # of a ToMA node before this one, whose place we take
        original = original.original
    seam = kind(original, *args)
    model.add_object_patch(path, seam)
    return seam


class FeedForwardSeam:
    """A block's feed-forward, which has no hook of its own: merged while its block says so, in that thread."""

    def __init__(self, original: Callable) -> None:
        self.original = original
        self.now = threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        merge: Merge | None = getattr(self.now, "merge", None)
        if merge is None:
            return self.original(x)
        return merge.unmerge(self.original(merge.merge(x)))


class BlockSeam:
    """A transformer block's forward."""

    def __init__(self, original: Callable, path: str, feed_forward: FeedForwardSeam | None) -> None:
        self.original = original
        self.path = path
        self.feed_forward = feed_forward

    def __call__(self, x: Tensor, context=None, transformer_options={}) -> Tensor:  # noqa: B006 - ComfyUI's signature
        call: Call | None = transformer_options.get(KEY)
        place = transformer_options[f"{KEY}_blocks"].get(self.path) if call else None
        if place is None:
            return self._original(x, context, transformer_options)
        height, width = transformer_options["activations_shape"][2:]
        if call.settings.merge is MergeWhere.BLOCK or call.action is Action.LEAVE or place.skipped:

            def run_block(tokens: Tensor, merge: Merge | None) -> Tensor:
                options = transformer_options
                if merge is not None:
                    options = _whole_for_others(options, merge, call.settings.carries)
                return self._original(tokens, context, options)

            return call.block(place, x, (height, width), run_block)
        return self._layers(call, place, x, (height, width), context, transformer_options)

    def _layers(self, call: Call, place: Place, x: Tensor, grid: Grid, context, options: dict) -> Tensor:
        """Merged inside each layer, after its norm; the residual stream keeps all tokens."""
        try:
            merge = uncompiled(call.merge_for, place, x, grid)
            layers = ("attn1",) if call.settings.merge is MergeWhere.ATTENTION else ("attn1", "attn2")
            free = [layer for layer in layers if not _patched(options, layer)]
            if self.feed_forward is not None and call.settings.merge is MergeWhere.LAYER:
                self.feed_forward.now.merge = merge
            out = self._original(x, context, _merged_attention(options, merge, free))
            call.count(place, grid, x, merge.kept.shape[1])
            return out
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            merge = None
        finally:
            if self.feed_forward is not None:
                self.feed_forward.now.merge = None
        return call.give_up(x, lambda tokens, _: self._original(tokens, context, options))

    def _original(self, x: Tensor, context, options: dict) -> Tensor:
        """The block itself. All blocks share one compiled forward, whose guards don't see the options: with
        patches each would run as the first one did, so then it is not compiled."""
        if has_patches(options):
            return uncompiled(self.original, x, context=context, transformer_options=options)
        return self.original(x, context=context, transformer_options=options)


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


def _tokens_through(layer: str, change: Callable[[Tensor], Tensor]) -> Callable:
    """An attention patch that changes the tokens; in self-attention keys and values are tokens too."""

    def patch(n: Tensor, context, value, extra_options):
        changed = change(n)
        if layer == "attn2":
            return changed, context, value
        keys = changed if context is n else change(context)
        return changed, keys, keys if value is context else change(value)

    return patch


def _whole_for_others(options: dict, merge: Merge, as_they_are: bool) -> dict:
    """Options of a merged block in which the patches of other nodes still see all tokens: where destinations stand for
    their group as they are, copies of them; else what unmerging gives, and its mean goes on."""
    whole, shorter = (merge.copied, merge.take) if as_they_are else (merge.unmerge, merge.merge)
    for layer in ("attn1", "attn2"):
        if _patched(options, layer):
            widen = _tokens_through(layer, partial(ours, whole))
            options = _around(
                options, layer, widen, lambda n, extra_options: ours(shorter, n), outermost=True
            )
    middle = options.get("patches", {}).get("middle_patch")
    if middle:

        def on_all(patch):
            return lambda x, extra_options: ours(shorter, patch(ours(whole, x), extra_options))

        options = {**options, "patches": {**options["patches"], "middle_patch": [on_all(p) for p in middle]}}
    return options


def _merged_attention(options: dict, merge: Merge, layers: list[str]) -> dict:
    """Options in which these attention layers work on merged tokens."""
    for layer in layers:
        narrow = _tokens_through(layer, merge.merge)
        options = _around(options, layer, narrow, lambda n, extra_options: merge.unmerge(n), outermost=False)
    return options
