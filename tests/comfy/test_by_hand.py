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


def merge_of(features, grid=(8, 8), keep=32):
    """Each picture's merge by itself, as dense matrices: [B, N, C] -> kept [B, K], M [B, K, N], A [B, K, N].

    That selection and weights are right is shown in tests/unit; here it is what the blocks make of them."""
    from comfyui_toma.toma_core.merge import reselect
    from comfyui_toma.toma_core.tiles import Tiles

    tiles = Tiles.of(*grid, 8)
    each = [reselect(tiles.split(picture[None]), keep, tiles)[1] for picture in features]
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


@torch.inference_mode()
def check_carry() -> None:
    """A full step and a merged one over a span of two blocks, with something added between (ControlNet):
    x + added + U (change of the kept tokens since then), where `added` is what the blocks did at the full step."""
    from comfyui_toma.toma_core.patcher.call import Kept, Place
    from comfyui_toma.toma_core.schedule import Action

    settings = settings_of(reselect_every=3)
    places = [Place("s", "s", 0, True, False), Place("s", "s", 1, False, True)]
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(16, 16, generator=generator) / 4 for _ in range(2))
    x0, x1 = (torch.randn(2, 64, 16, generator=generator) for _ in range(2))
    control = torch.randn(2, 64, 16, generator=generator)

    def block(weight):
        def run(tokens, merge):
            if merge is None:
                tokens += (tokens @ weight).tanh()  # in place, as Flux does
                return tokens
            return tokens + (tokens @ weight).tanh()

        return run

    def forward(call, x):
        x = call.block(places[0], x.clone(), (8, 8), block(first))
        return call.block(places[1], x + control, (8, 8), block(second))

    kept = Kept(1, 0, 0)
    full = forward(call_of(settings, Action.RESELECT, kept, control=True), x0)
    middle = x0 + (x0 @ first).tanh()
    assert torch.allclose(full, middle + control + ((middle + control) @ second).tanh(), atol=1e-5), (
        "not unmerged"
    )

    added = full - x0 - control
    kept_tokens, _, a = merge_of(added)
    m = torch.nn.functional.one_hot(kept_tokens, 64).float()  # destinations stand for themselves, no means
    tokens = m @ x1
    step = (tokens @ first).tanh()
    x = x1 + a.mT @ step + control
    tokens = m @ x
    change = (tokens @ second).tanh()
    # the change of the whole span is counted from the full step; both of its parts are in the merged space
    expected = x + added + a.mT @ (change - m @ added)
    merged = forward(call_of(settings, Action.REUSE, kept, control=True), x1)
    assert (merged - expected).norm() < 1e-3 * expected.norm()


def test_detail_is_carried_by_the_formula():
    check_carry()


def check_gather(budget: str) -> None:
    """Chunks of two batches, put together in another order, each keep what is theirs."""
    from comfyui_toma.toma_core.merge import Merge, reselect
    from comfyui_toma.toma_core.patcher.call import Kept
    from comfyui_toma.toma_core.tiles import Tiles

    tiles = Tiles.of(10, 11, 4)
    x = torch.randn(6, 110, 16, generator=torch.Generator().manual_seed(2))
    merges = [reselect(tiles.split(part), 40, tiles, budget=budget)[1] for part in (x[:4], x[4:])]
    first = Kept(2, 5, 5, {"m": merges[0]}, {"m": x[:4]}, {"m": merges[0].merge(x[:4])})
    second = Kept(1, 3, 4, {"m": merges[1]}, {"m": x[4:]}, {"m": merges[1].merge(x[4:])})
    assert Kept.gather([(first, 0), (first, 1)]) is first
    both = Kept.gather([(second, 0), (first, 1), (first, 0)])
    order = [4, 5, 2, 3, 0, 1]
    assert (both.chunks, both.selected_at, both.weighed_at) == (3, 3, 4)
    assert torch.equal(both.added["m"], x[order])
    alone: list[Merge] = [merges[i // 4].images(i % 4, i % 4 + 1) for i in order]
    assert torch.allclose(
        both.merges["m"].merge(x[order]), torch.cat([m.merge(x[i : i + 1]) for m, i in zip(alone, order)])
    )
    rows = both.added_merged["m"]
    back = torch.cat([m.unmerge(row[None]) for m, row in zip(alone, rows)])
    assert torch.allclose(both.merges["m"].unmerge(rows), back)


@pytest.mark.parametrize("budget", ["equal", "adaptive"])
def test_chunks_are_put_together_in_order(budget):
    check_gather(budget)
