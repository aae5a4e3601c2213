"""What is measured: no node, ToMA, a plainly shorter sequence, and what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Method:
    """`make` turns a ModelPatcher into a patched clone. One sample is the last step of a run of `steps`; `where` says
    which part of a block is merged, for the ideal by FLOPs (None: there is no such ideal)."""

    name: str
    make: Callable
    ratio: float | None = None
    steps: int = 1
    where: str | None = None
    note: str = ""

    @property
    def key(self) -> str:
        return self.name if self.ratio is None else f"{self.name} {self.ratio:g}"


def none() -> Method:
    return Method("none", lambda model: model, note="no node")


# --------------------------------------------------------------------------- ours


def toma(ratio: float, family: str) -> Method:
    """Merged and chosen anew at every step, kept tokens ride. On a DiT the first step is full: there is no clean
    estimate to choose by."""
    from comfyui_toma.toma_core.settings import PRESETS

    base = PRESETS["balanced"]["unet" if family == "unet" else "dit"]
    settings = replace(base, ratio=ratio, tolerance=0.0, end_percent=1.0)
    steps = 1 if family == "unet" else 2
    return Method("ToMA", partial(_toma, settings), ratio, steps, "whole block", "kept tokens ride")


def paper(family: str) -> Method:
    from comfyui_toma.toma_core.settings import PRESETS

    settings = replace(PRESETS["paper"]["unet" if family == "unet" else "dit"], skip_first_blocks=0)
    return Method("paper", partial(_toma, settings), settings.ratio, 1, settings.merge.value, "preset paper")


def _toma(settings, model):
    from comfyui_toma.toma_core.patcher import patch

    return patch(model, settings)


# --------------------------------------------------------------------------- around whole blocks

# run(x [B, N, C]) -> [B, N, C] is the block; x are the image tokens
Around = Callable[[Tensor, tuple[int, int], Callable[[Tensor], Tensor]], Tensor]


def _around_blocks(around: Around, model):
    """A clone whose blocks go through `around`. In Flux the rows of `pe` are simply cut off, which costs nothing."""
    model = model.clone()
    network = model.model.diffusion_model
    if not hasattr(network, "double_blocks"):
        for path, module in network.named_modules():
            if type(module).__name__ == "BasicTransformerBlock":
                path = f"diffusion_model.{path}.forward"
                original = model.get_model_object(path)  # not what an earlier method may have left in its place
                model.add_object_patch(path, partial(_unet_seam, around, original))
        return model
    for kind, blocks in (("double_block", network.double_blocks), ("single_block", network.single_blocks)):
        for i in range(len(blocks)):
            model.set_model_patch_replace(partial(_flux_slot, around, kind), "dit", kind, i)
    return model


def _unet_seam(around: Around, forward: Callable, x: Tensor, context=None, transformer_options=None) -> Tensor:
    grid = tuple(transformer_options["activations_shape"][2:])
    return around(x, grid, lambda y: forward(y, context=context, transformer_options=transformer_options))


def _flux_slot(around: Around, kind: str, args: dict, extra: dict) -> dict:
    image = args["img"]
    double = kind == "double_block"
    text = args["txt"].shape[1] if double else args["transformer_options"]["img_slice"][0]
    tokens = image if double else image[:, text:]
    height, width = (-(-side // 2) for side in args["transformer_options"]["latent_grid"])
    result = {}

    def run(y: Tensor) -> Tensor:
        sequence = y if double else torch.cat((image[:, :text], y), 1)
        given = {**args, "img": sequence, "pe": args["pe"][:, :, : text + y.shape[1]]}
        result.update(extra["original_block"](given))
        return result["img"] if double else result["img"][:, text:]

    out = around(tokens, (height, width), run)
    result["img"] = out if double else torch.cat((result["img"][:, :text], out), 1)
    return result


def with_grid(model):
    """Tells slots the latent's height and width, which Flux does not."""
    from comfy.patcher_extension import WrappersMP

    def tell(executor, x, *args, **kwargs):
        args = [{**arg, "latent_grid": x.shape[-2:]} if isinstance(arg, dict) else arg for arg in args]
        return executor(x, *args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "grid", tell)
    return model


def shorter(ratio: float) -> Method:
    """The block on so many tokens and nothing else: the rest passes by untouched. Nothing can be faster."""

    def around(x: Tensor, grid, run) -> Tensor:
        run(x[:, : max(1, round((1 - ratio) * x.shape[1]))])
        return x

    return Method("shorter", partial(_shorter, around), ratio, where="whole block", note="the physical limit")


def _shorter(around: Around, model):
    model = model.clone()
    network = model.model.diffusion_model
    if not hasattr(network, "double_blocks"):
        return _around_blocks(around, model)

    def slot(kind: str, args: dict, extra: dict) -> dict:
        image, result = args["img"], {}
        text = args["txt"].shape[1] if kind == "double_block" else args["transformer_options"]["img_slice"][0]
        start = 0 if kind == "double_block" else text

        def run(y: Tensor) -> None:
            rows = start + y.shape[1]
            result.update(
                extra["original_block"]({**args, "img": image[:, :rows], "pe": args["pe"][:, :, : text + y.shape[1]]})
            )

        around(image[:, start:], None, run)
        result["img"] = image
        return result

    for kind, blocks in (("double_block", network.double_blocks), ("single_block", network.single_blocks)):
        for i in range(len(blocks)):
            model.set_model_patch_replace(partial(slot, kind), "dit", kind, i)
    return model


# --------------------------------------------------------------------------- rivals


def tomesd(ratio: float) -> Method:
    """tomesd's matching, made in each block as tomesd does, around the whole block as ToMA does."""
    from tomesd.merge import bipartite_soft_matching_random2d

    generator = torch.Generator().manual_seed(0)

    def around(x: Tensor, grid, run) -> Tensor:
        height, width = grid
        merge, unmerge = bipartite_soft_matching_random2d(
            x, width, height, 2, 2, int(x.shape[1] * ratio), generator=generator
        )
        merged = merge(x)
        return x + unmerge(run(merged.clone()) - merged)

    return Method(
        "tomesd", lambda model: with_grid(_around_blocks(around, model)), ratio, where="whole block",
        note="its matching around the whole block",
    )  # fmt: skip


def tomesd_attention(ratio: float) -> Method:
    """tomesd's matching where tomesd puts it, around self-attention, at every resolution. UNet only."""
    from tomesd.merge import bipartite_soft_matching_random2d

    generator = torch.Generator().manual_seed(0)

    def make(model):
        model, unmerges = model.clone(), []

        def narrow(n, context, value, extra_options):
            height, width = extra_options["activations_shape"][2:]
            merge, unmerge = bipartite_soft_matching_random2d(
                n, width, height, 2, 2, int(n.shape[1] * ratio), generator=generator
            )
            unmerges.append(unmerge)
            merged = merge(n)
            return merged, merged, merged

        model.set_model_attn1_patch(narrow)
        model.set_model_attn1_output_patch(lambda n, extra_options: unmerges.pop()(n))
        return model

    return Method("tomesd attention", make, ratio, where="attention only", note="its matching where it puts it")


def todo() -> Method:
    """ToDo: keys and values of self-attention from every second token in both directions."""

    def unet(n, context, value, extra_options):
        height, width = extra_options["activations_shape"][2:]
        fewer = n.unflatten(1, (height, width))[:, ::2, ::2].flatten(1, 2)
        return n, fewer, fewer

    def flux(q, k, v, pe, attn_mask, extra_options):
        from comfy.ldm.flux.math import apply_rope

        start = extra_options["img_slice"][0]
        height, width = (-(-side // 2) for side in extra_options["latent_grid"])
        q, k = apply_rope(q, k, pe)

        def fewer(x: Tensor) -> Tensor:
            image = x[:, :, start:].unflatten(2, (height, width))[:, :, ::2, ::2].flatten(2, 3)
            return torch.cat((x[:, :, :start], image), 2)

        return {"q": q, "k": fewer(k), "v": fewer(v), "pe": None}

    def make(model):
        is_flux = hasattr(model.model.diffusion_model, "double_blocks")
        model = model.clone()
        model.set_model_attn1_patch(flux if is_flux else unet)
        return with_grid(model)

    return Method("todo", make, note="keys and values of a quarter of the tokens")


def tome_node(ratio: float = 0.3) -> Method:
    from comfy_extras.nodes_tomesd import TomePatchModel

    return Method(
        "TomePatchModel",
        lambda model: _output(TomePatchModel.execute(model, ratio)),
        ratio,
        note="as shipped",
    )


def hypertile(max_depth: int = 0) -> Method:
    from comfy_extras.nodes_hypertile import HyperTile

    name = "HyperTile" if max_depth == 0 else f"HyperTile depth {max_depth}"
    note = "as shipped" if max_depth == 0 else f"tile 256, max_depth {max_depth}"
    return Method(name, lambda model: _output(HyperTile.execute(model, 256, 2, max_depth, False)), note=note)


def _output(node_output):
    return node_output[0] if isinstance(node_output, tuple) else node_output.args[0]
