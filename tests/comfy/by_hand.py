"""The method written down a second time, plainly, inside of an unpatched model: what the pack is compared with.

Picks and weights come from toma_core (tests/unit shows that they are right), as dense matrices of each image by itself;
what is made of them is written here.
"""

from __future__ import annotations

import inspect

import torch
from einops import rearrange


def merge_of(features, grid=(8, 8), keep=32, tile=8, last=None):
    """[B, N, C] -> kept [B, K], M [B, K, N], U [B, N, K], and the destinations of each image."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.tiles import Tiles

    tiles = Tiles.of(*grid, tile)
    each = [
        reselect(tiles.split(features[i : i + 1]), keep, tiles, last=last and last[i]) for i in range(len(features))
    ]
    kept = torch.cat([merge.kept for merge in each])
    m = torch.cat([merge.merge(torch.eye(tiles.tokens)[None]) for merge in each])
    u = torch.cat([merge.unmerge(torch.eye(keep)[None]) for merge in each])
    return kept, m, u, [merge.destinations for merge in each]


def rows(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.stack([image[index] for image, index in zip(x.expand(len(kept), -1, -1), kept)])


def riding_flux(model, share: float = 0.5, with_control: bool = True, own_noise: bool = True):
    """Flux without the pack, whose network gets only the kept tokens and their positions after the first step:

    x0_i = last x0_i + U (x0_kept - last x0_kept), picked by the last x0, what was picked rests for a step."""
    from comfy.patcher_extension import WrappersMP

    states: dict = {}

    def network(executor, *args, **kwargs):
        net = executor.class_obj
        given = inspect.signature(type(net)._forward).bind(net, *args, **kwargs).arguments
        state = states.setdefault(tuple(given["transformer_options"]["uuids"]), {})
        x, sigma = given["x"], given["timestep"].view(-1, 1, 1)
        img, ids = net.process_img(x)
        grid = (-(-x.shape[2] // 2), -(-x.shape[3] // 2))
        if "last" not in state:
            out = rearrange(executor(*args, **kwargs), "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)
            state["last"] = img - sigma * out
        else:
            last, keep = state["last"], round(img.shape[1] * share)
            kept, _, u, state["rest"] = merge_of(last, grid, keep, last=state.get("rest"))
            control = given.get("control")
            if not with_control:
                control = None
            if control is not None:
                control = {
                    kind: [None if add is None else rows(add, kept) for add in adds] for kind, adds in control.items()
                }
            text_ids = torch.zeros(len(x), given["context"].shape[1], 3)
            out = net.forward_orig(
                rows(img, kept), rows(ids, kept), given["context"], text_ids, given["timestep"], given["y"],
                given.get("guidance"), control,
            )  # fmt: skip
            if own_noise:
                clean = rows(img, kept) - sigma * out
                state["last"] = last + u @ (clean - rows(last, kept))
            else:
                state["last"] = img - sigma * (u @ out)
        velocity = (img - state["last"]) / sigma
        return rearrange(velocity, "b (h w) (c p q) -> b c (h p) (w q)", h=grid[0], p=2, q=2)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "by hand", network)
    return model


def published_flux(model, keep: int = 32, grid=(8, 8)):
    """As the authors have it, block by block: x + U (block(M x) - M x), rotated as the destinations are; one choice a
    kind of block and step, by the tokens that its first block gets."""
    state: dict = {}

    def slot(kind: str, index: int):
        def run(args, extra):
            text = 0 if kind == "double_block" else args["img"].shape[1] - grid[0] * grid[1]
            before = args["pe"].shape[2] - grid[0] * grid[1]
            x = args["img"][:, text:].clone()
            if index == 0:
                state[kind] = merge_of(x, grid, keep)
            kept, m, u, _ = state[kind]
            which = torch.cat((torch.arange(before).expand(len(kept), -1), kept + before), 1)
            pe = torch.stack([p[:, w] for p, w in zip(args["pe"].expand(len(kept), *args["pe"].shape[1:]), which)])
            tokens = m @ x
            out = extra["original_block"](
                {**args, "img": torch.cat((args["img"][:, :text], tokens), 1).clone(), "pe": pe}
            )
            made = x + u @ (out["img"][:, text:] - tokens)
            return {**out, "img": torch.cat((out["img"][:, :text], made), 1)}

        return run

    model = model.clone()
    network = model.model.diffusion_model
    for kind in ("double_block", "single_block"):
        for index in range(len(getattr(network, f"{kind}s"))):
            model.set_model_patch_replace(slot(kind, index), "dit", kind, index)
    return model


class UNetByHand:
    """A UNet without the pack whose transformer blocks are merged by hand while this is entered: `published` inside of
    each layer, x + U layer(M norm(x)), one choice a token grid; else each spatial transformer as a whole,
    x + U (blocks(M x) - M x), one choice each."""

    def __init__(self, model, published: bool, reselect_every: int = 1, keep=lambda n: n // 2, tile: int = 8) -> None:
        self.network, self.published, self.keep, self.tile = model.model.diffusion_model, published, keep, tile
        self.every, self.calls, self.found, self.row = reselect_every, -1, {}, {}

    def __enter__(self):
        for name, module in self.network.named_modules():
            for index, block in enumerate(getattr(module, "transformer_blocks", ())):
                last = index == len(module.transformer_blocks) - 1
                block.forward = self.layers(block) if self.published else self.whole(name, block, index, last)
        self.hook = self.network.register_forward_pre_hook(self.next)
        return self

    def __exit__(self, *_):
        self.hook.remove()
        for module in self.network.modules():
            for block in getattr(module, "transformer_blocks", ()):
                del block.forward

    def next(self, *_):
        self.calls += 1
        if self.calls % self.every == 0:
            self.found.clear()

    def choice(self, key, x, options):
        grid = tuple(options["activations_shape"][2:])
        if (key, grid) not in self.found:
            self.found[key, grid] = merge_of(x, grid, self.keep(x.shape[1]), self.tile)
        return self.found[key, grid]

    def layers(self, block):
        def forward(x, context=None, transformer_options={}):  # noqa: B006
            _, m, u, _ = self.choice("all", x, transformer_options)
            x = x + u @ block.attn1(m @ block.norm1(x))
            x = x + u @ block.attn2(m @ block.norm2(x), context=context)
            return x + u @ block.ff(m @ block.norm3(x))

        return forward

    def whole(self, name, block, index, last):
        def forward(x, context=None, transformer_options={}):  # noqa: B006
            if index == 0:
                _, m, u, _ = self.choice(name, x, transformer_options)
                self.row[name] = (x, m @ x, u)
                x = m @ x
            x = type(block).forward(block, x, context=context, transformer_options=transformer_options)
            before, tokens, u = self.row[name]
            return before + u @ (x - tokens) if last else x

        return forward
