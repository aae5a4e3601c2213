"""Flux with merge set to 'attention only': queries, keys and values of image tokens are merged inside of each block."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ...evaluation import Evaluation
from ..dynamo import without_compile
from ..memory import guarded
from .base import KEY
from .rows import Cut, argument_for

if TYPE_CHECKING:
    from .dit import DiTFamily


class AttentionSeam:
    """ComfyUI's attention patches of Flux's blocks."""

    def __init__(self, family: DiTFamily) -> None:
        self.blocks = {(stream.kind, i): (block, stream) for block, (stream, i) in family.where.items()}

    def __deepcopy__(self, memo: dict) -> AttentionSeam:
        return self

    @staticmethod
    def fits(network: nn.Module) -> bool:
        blocks: Any = getattr(network, "double_blocks", None)
        return bool(blocks) and "attn1_patch" in type(without_compile(blocks[0])).forward.__code__.co_consts

    def install(self, options: dict) -> None:
        patches = options.setdefault("patches", {})
        patches["attn1_patch"] = [*patches.get("attn1_patch", ()), self.before]
        patches["attn1_output_patch"] = [self.after, *patches.get("attn1_output_patch", ())]

    def before(self, q: Tensor, k: Tensor, v: Tensor, pe, attn_mask, extra_options) -> dict:
        """q, k, v [B, H, L, D] before attention: image tokens merged by the likeness of their keys."""
        evaluation: Evaluation | None = extra_options.get(KEY)
        if evaluation is None:
            return {}
        block, stream = self.blocks[extra_options["block_type"], extra_options["block_index"]]
        start, count = extra_options["img_slice"][0], prod(evaluation.grid)
        stop = start + count
        beside = k.shape[2] - stop
        channels = k.shape[1] * k.shape[3]
        if not evaluation.merges or block.skipped:
            evaluation.count(block, evaluation.grid, channels, count, count, beside, text=start)
            return {}

        def keys() -> Tensor:
            return rearrange(k[:, :, start:stop], "b h n d -> b n (h d)")

        merge = guarded(lambda: evaluation.merge_for(block, keys(), evaluation.grid))

        def shorter(x: Tensor) -> Tensor:
            tokens = merge.merge(rearrange(x[:, :, start:stop], "b h n d -> b n (h d)"))
            tokens = rearrange(tokens, "b n (h d) -> b h n d", h=x.shape[1])
            return torch.cat((x[:, :, :start], tokens, x[:, :, stop:]), 2)

        def changed() -> dict:
            cut = Cut(merge, start, k.shape[2])
            given = {"pe": pe, "attn_mask": attn_mask}
            rest = {
                name: argument_for(stream, evaluation, name, value, cut)
                for name, value in given.items()
                if value is not None
            }
            return {**given, "q": shorter(q), "k": shorter(k), "v": shorter(v), **rest}

        found = guarded(changed)
        evaluation.count(block, evaluation.grid, channels, count, merge.kept.shape[1], beside, text=start)
        evaluation.scratch["attention"] = (merge, start)
        return found

    def after(self, attention: Tensor, extra_options: dict) -> Tensor:
        """attention [B, L, C] of merged tokens, given back to all of them."""
        evaluation: Evaluation | None = extra_options.get(KEY)
        held = evaluation.scratch.pop("attention", None) if evaluation else None
        if held is None:
            return attention
        merge, start = held
        end = start + merge.kept.shape[1]

        def whole() -> Tensor:
            image = merge.unmerge(attention[:, start:end])
            return torch.cat((attention[:, :start], image, attention[:, end:]), 1)

        return guarded(whole)
