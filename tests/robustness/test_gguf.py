"""GGUF for real: weights that stay quantised while their model is forecast and merged, with a LoRA on top."""

import builders
import pytest
import torch
from calling import FORECAST, MERGED, RUN, told, toma
from composing import far

gguf = pytest.importorskip("gguf")
BOTH = {"ratio": 0.5, "tolerance": 0.1}
KINDS = {"Q8_0": 0.02, "Q4_0": 0.4}  # and how far its weights may be from the unquantised ones


@pytest.fixture(scope="module", params=KINDS)
def pair(request, bench, tmp_path_factory):
    """The quantised model, and the same weights dequantised in a plain one."""
    import comfy.sd
    import gguf_flux
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("gguf")
    plain = load_file(builders.tiny_flux_file(folder / "flux.safetensors", hidden=128, depth=2, depth_single=2))
    file = gguf_flux.write(plain, folder / "flux.gguf", gguf.GGMLQuantizationType[request.param])
    weights = gguf_flux.read(file)
    dense = {
        name: weight.dequantised(torch.float32) if isinstance(weight, gguf_flux.Quantised) else weight.clone()
        for name, weight in weights.items()
    }
    model = gguf_flux.load(weights)
    assert (
        far(dense["double_blocks.0.img_mlp.0.weight"], plain["double_blocks.0.img_mlp.0.weight"]) < KINDS[request.param]
    )
    return model, comfy.sd.load_diffusion_model_state_dict(dense)


@pytest.fixture(params=["", "LoRA"])
def models(request, pair, bench):
    """Both of them, also with a LoRA."""
    import comfy.sd

    if not request.param:
        return pair
    return tuple(comfy.sd.load_lora_for_models(model, None, bench.lora("flux"), 1.0, 0.0)[0] for model in pair)


def still_quantised(model) -> int:
    import gguf_flux

    found = gguf_flux.quantised(model)
    assert all(weight.as_subclass(torch.Tensor).dtype is torch.uint8 for weight in found)
    return len(found)


@pytest.mark.parametrize("settings", [FORECAST, MERGED, BOTH], ids=["forecast", "merged", "both"])
def test_as_the_dequantised_model(models, settings):
    quantised, dense = models
    count = still_quantised(quantised)
    assert count >= 20
    before = builders.sample(quantised, **RUN)
    assert far(before, builders.sample(dense, **RUN)) < 1e-3
    ours, theirs = toma(quantised, **settings), toma(dense, **settings)
    assert far(builders.sample(ours, **RUN), builders.sample(theirs, **RUN)) < 1e-2
    assert told(ours).kinds == told(theirs).kinds and told(ours).tokens == told(theirs).tokens
    assert told(ours).counts["forecast"] or told(ours).tokens
    assert still_quantised(quantised) == count and torch.equal(builders.sample(quantised, **RUN), before)


def test_a_lora_has_its_effect_on_the_merged_model(pair, bench):
    import comfy.sd

    model = pair[0]
    with_lora = comfy.sd.load_lora_for_models(model, None, bench.lora("flux"), 1.0, 0.0)[0]
    outs = [builders.sample(toma(m, **MERGED), **RUN) for m in (model, with_lora, model)]
    assert far(outs[1], outs[0]) > 0.01 and torch.equal(outs[0], outs[2])
