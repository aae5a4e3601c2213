"""The patched blocks against the formulas, computed here step by step with the model's own blocks.

The checks are functions, so that test_mutations.py can show that each of them fails when the code is broken.
"""

from __future__ import annotations

import builders
import pytest
import torch


def call_of(settings, action, kept=None, latent=(16, 16), **about):
    from comfyui_toma.toma_core.patcher.call import Call, Kept

    return Call(settings, action, kept or Kept(1, 0, 0), latent=latent, **about)


def settings_of(**changes):
    from comfyui_toma.toma_core.settings import Settings

    return Settings(**{"ratio": 0.5, "skip_first_blocks": 0, "reselect_every": 1, **changes})


def merge_of(features, grid=(8, 8), keep=32, temperature=1000.0, last=None):
    """Each picture's merge by itself, as dense matrices: [B, N, C] -> kept [B, K], M [B, K, N], A [B, K, N].

    That selection and weights are right is shown in tests/unit; here it is what the blocks make of them."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.tiles import Tiles

    tiles = Tiles.of(*grid, 8)
    each = [
        reselect(tiles.split(features[i : i + 1]), keep, tiles, temperature, last=last and last.images(i, i + 1))
        for i in range(len(features))
    ]
    kept = torch.cat([merge.kept for merge in each])
    m = torch.cat([merge.merge(torch.eye(tiles.tokens)[None]) for merge in each])
    u = torch.cat([merge.unmerge(torch.eye(keep)[None]) for merge in each])
    return kept, m, u.mT


def flux_block(models, kind: str, batch: int = 2):
    """A block of the tiny Flux with inputs for 8x8 image tokens: (network, args of its slot, its module)."""
    network = models["flux"].model.diffusion_model
    generator = torch.Generator().manual_seed(3)
    hidden, text = network.hidden_size, 5
    ids = torch.zeros(batch, text + 64, 3)
    ids[:, text:, 1] = torch.arange(64) // 8
    ids[:, text:, 2] = torch.arange(64) % 8
    args = {
        "img": torch.randn(batch, 64 + (text if kind == "single" else 0), hidden, generator=generator),
        "vec": torch.randn(batch, hidden, generator=generator),
        "pe": network.pe_embedder(ids),
        "attn_mask": None,
        "transformer_options": {"img_slice": [text, text + 64]},
    }
    if kind == "double":
        args["txt"] = torch.randn(batch, text, hidden, generator=generator)
    return network, args


def run_slot(family, place, args, block):
    """What ComfyUI does with a slot of patches_replace: the original block adds to its inputs in place."""

    def original(given):
        if "txt" in given:
            image, text = block(img=given["img"], txt=given["txt"], vec=given["vec"], pe=given["pe"])
            return {"img": image, "txt": text}
        return {"img": block(given["img"], vec=given["vec"], pe=given["pe"])}

    copies = {k: v.clone() if torch.is_tensor(v) else v for k, v in args.items()}
    return family._block(place, None, copies, {"original_block": original})


@torch.inference_mode()
def check_flux_block(models, kind: str) -> None:
    """x + U (block(M x) - M x), with the RoPE rows of the destinations and the text unmerged."""
    from comfyui_toma.toma_core.patcher.flux import FluxFamily
    from comfyui_toma.toma_core.schedule import Action

    network, args = flux_block(models, kind)
    settings = settings_of()
    family = FluxFamily(models["flux"], settings)
    place = next(p for p in family.places if p.span == kind)
    block = getattr(network, f"{kind}_blocks")[0]
    args["transformer_options"]["toma"] = call_of(settings, Action.RESELECT)
    out = run_slot(family, place, args, block)

    start = 0 if kind == "double" else 5
    x = args["img"][:, start:]
    kept, m, a = merge_of(x)
    tokens = m @ x
    rows = torch.cat((torch.arange(5).expand(2, -1), kept + 5), 1)
    pe = torch.stack([args["pe"][b][:, rows[b]] for b in range(2)])
    if kind == "double":
        image, text = block(img=tokens.clone(), txt=args["txt"].clone(), vec=args["vec"], pe=pe)
        assert torch.allclose(out["txt"], text, atol=1e-3)
    else:
        sequence = block(torch.cat((args["img"][:, :5], tokens), 1), vec=args["vec"], pe=pe)
        image = sequence[:, 5:]
        assert torch.allclose(out["img"][:, :5], sequence[:, :5], atol=1e-3)
    expected = x + a.mT @ (image - tokens)
    assert (out["img"][:, start:] - expected).norm() < 1e-3 * expected.norm()
    unmerged = out["img"][:, start:] - x
    assert unmerged.norm() > 1e-2 * x.norm(), "the block added nothing"


@pytest.mark.parametrize("kind", ["double", "single"])
def test_flux_block_follows_the_formula(models, kind):
    check_flux_block(models, kind)


@torch.inference_mode()
def check_unet_block(models) -> None:
    """The same for a UNet's transformer block."""
    from comfyui_toma.toma_core.patcher.unet import BlockSeam, UNetFamily
    from comfyui_toma.toma_core.schedule import Action

    model = models["sdxl"]
    settings = settings_of()
    family = UNetFamily(model, settings)
    place = family.places[0]
    block = model.get_model_object(family.paths[place])
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 64, 64, generator=generator)
    context = torch.randn(2, 7, builders.SDXL_CONTEXT, generator=generator)
    options = {"activations_shape": [2, 64, 8, 8], "toma": call_of(settings, Action.RESELECT)}
    family.install(options)
    seam = BlockSeam(type(block).forward.__get__(block), family.paths[place], None)
    out = seam(x.clone(), context=context, transformer_options=options)
    kept, m, a = merge_of(x)
    tokens = m @ x
    expected = x + a.mT @ (block(tokens, context=context) - tokens)
    assert (out - expected).norm() < 1e-3 * expected.norm()
    assert (out - x).norm() > 1e-2 * x.norm()


def test_unet_block_follows_the_formula(models):
    check_unet_block(models)
