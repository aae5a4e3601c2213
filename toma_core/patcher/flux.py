"""Flux and its family, through ComfyUI's `patches_replace["dit"]`: one slot a block, the block itself runs.

A double block has image tokens apart from text tokens, a single block has text then image in one sequence.
Reference latents (Kontext) follow the image tokens and are not merged.
"""

from __future__ import annotations

from functools import partial
from math import ceil, prod

import torch
from einops import rearrange
from torch import Tensor

from ..merge import Merge
from ..schedule import Action
from ..settings import MergeWhere, Settings, SettingsError
from .call import Call, Grid, Place
from .compiled import has_patches, keep_out_of_graphs, uncompiled
from .detail import finite, samples
from .memory import NoMemoryToMerge, ours, raise_unless_out_of_memory
from .run import KEY, Family, network_of

PUBLISHED_SKIP = 5


class FluxFamily(Family):
    name = "flux"
    description = "Flux (dev, schnell, Kontext, Fill, Flux.2, Chroma and other checkpoints of these classes)"

    @staticmethod
    def matches(network) -> bool:
        from comfy.ldm.chroma.model import Chroma
        from comfy.ldm.flux.model import Flux

        return type(network) in (Flux, Chroma)

    def __init__(self, model, settings: Settings) -> None:
        network = network_of(model)
        self.settings = settings
        self.patch_size: int = network.patch_size
        self.reference_method: str = getattr(network.params, "default_ref_method", "offset")
        silu = getattr(network.params, "mlp_silu_act", False)
        self.weights_per_token = 4 + network.params.mlp_ratio * (
            3 if silu else 2
        )  # of a block, in channels squared
        if settings.merge is MergeWhere.ATTENTION and not _has_attention_patch(network):
            raise SettingsError(
                "merge is 'attention only', which needs a newer ComfyUI on Flux. Set it to 'whole block'."
            )
        skip = settings.skip_first_blocks
        if skip < 0:
            skip = 0 if settings.carries else PUBLISHED_SKIP
        self.places = [
            Place(kind, kind, i, first=i == skip, last=i == depth - 1, skipped=i < skip)
            for kind, depth in (
                ("double", len(network.double_blocks)),
                ("single", len(network.single_blocks)),
            )
            for i in range(depth)
        ]
        # These patches sit inside of the blocks, where nothing would tell a graph with them from one without.
        self.compiles = settings.merge is not MergeWhere.ATTENTION

    def install(self, options: dict) -> None:
        keep_out_of_graphs(FluxFamily, Call, finite, samples, _run, ours)
        if self.settings.merge is MergeWhere.ATTENTION:
            patches = options.setdefault("patches", {})
            patches["attn1_patch"] = [*patches.get("attn1_patch", ()), self._attention_in]
            patches["attn1_output_patch"] = [self._attention_out, *patches.get("attn1_output_patch", ())]
        run_slot = self._attention_block if self.settings.merge is MergeWhere.ATTENTION else self._block
        slots = options.setdefault("patches_replace", {}).setdefault("dit", {})
        for place in self.places:
            slot = (f"{place.span}_block", place.index)
            slots[slot] = partial(run_slot, place, slots.get(slot))

    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        if x.ndim != 4:
            return f"the latent has {x.ndim} dimensions instead of 4"
        method = inputs.get("ref_latents_method", self.reference_method)
        if inputs.get("ref_latents") is not None and method == "index_timestep_zero":
            return "reference latents with a timestep of zero are modulated by token ranges"
        return None

    def label(self, place: Place, grid: Grid) -> str:
        return place.span

    def block_flops(
        self, place: Place, before: int, after: int, channels: int, text: int, beside: int
    ) -> float:
        linear = before if self.settings.merge is MergeWhere.ATTENTION else after
        products = self.weights_per_token * (linear + text + beside) * channels**2
        return 2.0 * (products + 2 * (after + text + beside) ** 2 * channels)

    def _grid(self, call: Call) -> Grid:
        height, width = call.latent
        return ceil(height / self.patch_size), ceil(width / self.patch_size)

    def _block(self, place: Place, inner, args: dict, extra: dict) -> dict:
        """A block's slot. `inner` is what another node had put there."""
        options = args["transformer_options"]
        call: Call | None = options.get(KEY)
        if call is None:
            return _run(inner, args, extra)
        grid, sequence = self._grid(call), args["img"]
        text = args["txt"].shape[1] if place.span == "double" else options["img_slice"][0]
        start = 0 if place.span == "double" else text
        stop = start + prod(grid)
        call.beside = sequence.shape[1] - stop
        result: dict = {}

        def merged_args(tokens: Tensor, merge: Merge) -> dict:
            shorter = torch.cat((sequence[:, :start], tokens, sequence[:, stop:]), 1)
            merged = {
                **args,
                "img": shorter,
                **uncompiled(_for_rows, call, place, merge, args, text, stop - start),
            }
            if "txt" in args:
                merged["txt"] = args[
                    "txt"
                ].clone()  # blocks add to it in place; a second try needs the old one
            return merged

        def run_block(tokens: Tensor, merge: Merge | None) -> Tensor:
            if merge is None:
                result.update(_run(inner, args, extra))
                return result["img"][:, start:stop]
            result.update(_run(inner, ours(merged_args, tokens, merge), extra))
            return result["img"][:, start : start + tokens.shape[1]]

        def whole(tokens: Tensor, out: Tensor) -> Tensor:
            if tokens.shape[1] == sequence.shape[1]:
                return tokens
            end = out.shape[1] - (sequence.shape[1] - stop)
            return torch.cat((out[:, :start], tokens, out[:, end:]), 1)

        tokens = call.block(place, sequence[:, start:stop], grid, run_block)
        if result["img"].shape[1] < sequence.shape[1]:
            try:
                result["img"] = ours(whole, tokens, result["img"])
            except NoMemoryToMerge:
                tokens = result["img"] = None
            if tokens is None:
                call.count(place, grid, sequence[:, start:stop], stop - start)
                call.give_up(sequence[:, start:stop], run_block)
        return result

    def _attention_block(self, _: Place, inner, args: dict, extra: dict) -> dict:
        """A block's slot where only attention is merged. Without memory to unmerge the block runs again: it
        overwrites its tokens only after attention."""
        try:
            return _run(inner, args, extra)
        except NoMemoryToMerge:
            call: Call = args["transformer_options"][KEY]
        return call.give_up(args, lambda args, _: _run(inner, args, extra))

    def _attention_in(self, q: Tensor, k: Tensor, v: Tensor, pe, attn_mask, extra_options) -> dict:
        """q, k, v [B, H, L, D] before attention: image tokens merged by the likeness of their keys."""
        call: Call | None = extra_options.get(KEY)
        if call is None:
            return {}
        place = self.by_name[extra_options["block_type"], extra_options["block_index"]]
        grid, start = self._grid(call), extra_options["img_slice"][0]
        stop = start + prod(grid)
        keys = rearrange(k[:, :, start:stop], "b h n d -> b n (h d)")
        call.beside = k.shape[2] - stop
        if call.action is Action.LEAVE or place.skipped:
            call.count(place, grid, keys, prod(grid))
            return {}

        def shorter(x: Tensor) -> Tensor:
            tokens = merge.merge(rearrange(x[:, :, start:stop], "b h n d -> b n (h d)"))
            tokens = rearrange(tokens, "b n (h d) -> b h n d", h=x.shape[1])
            return torch.cat((x[:, :, :start], tokens, x[:, :, stop:]), 2)

        try:
            merge = uncompiled(call.merge_for, place, keys, grid)
            rest = uncompiled(
                _for_rows, call, place, merge, {"pe": pe, "attn_mask": attn_mask}, start, stop - start
            )
            changed = {"q": shorter(q), "k": shorter(k), "v": shorter(v), **rest}
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            return call.give_up({}, lambda nothing, _: nothing)
        call.count(place, grid, keys, merge.kept.shape[1])
        call.scratch["attention"] = (merge, start)
        return changed

    def _attention_out(self, attention: Tensor, extra_options: dict) -> Tensor:
        """attention [B, L, C] of merged tokens, given back to all of them."""
        call: Call | None = extra_options.get(KEY)
        held = call.scratch.pop("attention", None) if call else None
        if held is None:
            return attention
        merge, start = held
        end = start + merge.kept.shape[1]

        def whole() -> Tensor:
            return torch.cat(
                (attention[:, :start], merge.unmerge(attention[:, start:end]), attention[:, end:]), 1
            )

        return ours(whole)


def _run(inner, args: dict, extra: dict) -> dict:
    if inner:
        return uncompiled(inner, args, extra)
    if has_patches(args["transformer_options"]):
        return uncompiled(extra["original_block"], args)
    return extra["original_block"](args)


def _has_attention_patch(network) -> bool:
    return "attn1_patch" in type(network.double_blocks[0]).forward.__code__.co_consts


def _for_rows(call: Call, place: Place, merge: Merge, args: dict, text: int, image: int) -> dict:
    """`pe` and `attn_mask` of the rows that stay: all text, the kept image tokens, all that follows.

    Merged tokens stand where their destinations stand. Both are the same for all blocks of a call."""
    pe, mask = args.get("pe"), args.get("attn_mask")
    made = call.scratch.get(place.share)
    if made is None or made[0] is not pe or made[1] is not mask or made[2] is not merge:
        rows = _rows(merge, text, image, pe.shape[2] - text - image)
        made = (pe, mask, merge, _take_pe(pe, rows), _take_mask(mask, rows))
        call.scratch[place.share] = made
    return {"pe": made[3], "attn_mask": made[4]}


def _rows(merge: Merge, text: int, image: int, rest: int) -> Tensor:
    """[B, L'] the rows of the full sequence that the merged one holds."""
    kept = merge.kept
    before = torch.arange(text, device=kept.device).expand(kept.shape[0], -1)
    after = torch.arange(text + image, text + image + rest, device=kept.device).expand(kept.shape[0], -1)
    return torch.cat((before, kept + text, after), 1)


def _take_pe(pe: Tensor, rows: Tensor) -> Tensor:
    """pe [B or 1, 1, L, D/2, 2, 2] at rows [B, L']."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None] if pe.shape[0] > 1 else 0
    return pe[batch, 0, rows].unsqueeze(1)


def _take_mask(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """mask [L, L], [B or 1, L, L] or [B or 1, H or 1, L, L] at rows [B, L'], each side that has all L."""
    if mask is None:
        return None
    while mask.ndim < 4:
        mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
    mask = mask.expand(rows.shape[0], -1, -1, -1)
    length = mask.shape[-1]
    if mask.shape[-2] == length:
        mask = torch.gather(mask, 2, rows[:, None, :, None].expand(-1, mask.shape[1], -1, length))
    return torch.gather(mask, 3, rows[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))
