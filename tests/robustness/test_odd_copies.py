"""Packs that copy the options of a model deeply, or swap the classes of a network: the same run, the same model."""

import copy
import threading
from contextlib import contextmanager

import builders
import pytest
import torch
from calling import FORECAST, MERGED, RUN, told, toma
from test_odd_callers import foreign_forward

# --------------------------------------------------------------------------- what is copied


class Locked:
    """A listener that no one can copy."""

    def __init__(self) -> None:
        self.lock, self.steps = threading.Lock(), 0

    def __bool__(self) -> bool:
        return True

    def stepped(self, report) -> None:
        self.steps += 1

    def picked(self, pick) -> None: ...

    def ended(self, report) -> None: ...


@pytest.mark.parametrize("settings", [FORECAST, MERGED], ids=["forecast", "merged"])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_options_that_are_copied_at_each_step(bench, name, settings):
    """pre_cfg nodes copy the options deeply and evaluate the prompt once more by them: it is the same run."""
    import comfy.samplers

    def copying(model, copied):
        def pre_cfg(args):
            options = copied(args["model_options"])
            again = comfy.samplers.calc_cond_batch(
                args["model"], [args["conds"][0]], args["input"], args["timestep"], options
            )
            return [args["conds_out"][0] * 0.9 + again[0] * 0.1, *args["conds_out"][1:]]

        model = model.clone()
        model.model_options = comfy.model_patcher.set_model_options_pre_cfg_function(model.model_options, pre_cfg)
        return model

    listener, outs = Locked(), []
    for copied in (copy.deepcopy, lambda options: options):
        patched = copying(toma(bench.models[name], listener, **settings), copied)
        outs.append(builders.sample(patched, **RUN))
        assert told(patched).counts["forecast"] or told(patched).tokens
    assert torch.equal(*outs) and listener.steps == 2 * RUN["steps"]


def test_a_patcher_that_is_made_anew_from_copied_options(bench):
    """AnimateDiff-Evolved's unload node and others take the options of a model and leave its wrappers behind."""
    import comfy.model_patcher

    model = toma(bench.models["sdxl"], **MERGED)
    other = comfy.model_patcher.ModelPatcher(model.model, model.load_device, model.offload_device)
    other.model_options = copy.deepcopy(model.model_options)
    assert torch.equal(builders.sample(other, **RUN), builders.sample(model, **RUN))
    assert other.model_options["toma"] is model.model_options["toma"] and len(model.model_options["toma"].reports) == 2


# --------------------------------------------------------------------------- classes that are swapped


@contextmanager
def as_class(module, kind):
    before = type(module)
    module.__class__ = kind
    try:
        yield
    finally:
        module.__class__ = before


def test_a_network_of_a_subclass(bench):
    """Packs swap the class to add a hook. It stays a Flux, and its tokens are merged."""
    model, network = bench.models["flux"], bench.models["flux"].model.diffusion_model
    expected = builders.sample(toma(model, **MERGED), **RUN)

    class Flux(type(network)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class OwnFlux(type(network)):
        forward_orig = foreign_forward("no options")

    with as_class(network, Flux):
        patched = toma(model, **MERGED)
        assert torch.equal(builders.sample(patched, **RUN), expected) and told(patched).tokens
    with as_class(network, OwnFlux):
        patched = toma(model, **MERGED)
        assert torch.equal(builders.sample(patched, **RUN), builders.sample(model, **RUN))
        forecast = toma(model, **FORECAST)
        builders.sample(forecast, **RUN)
    assert told(patched).family == "flux" and "not" in told(patched).notes[0] and told(forecast).counts["forecast"]
    assert torch.equal(builders.sample(toma(model, **MERGED), **RUN), expected)


def test_blocks_of_a_unet_with_arguments_of_another_pack(bench):
    """RES4LYF's blocks take a style_block that its spatial transformers hand on."""
    from comfy.ldm.modules.attention import BasicTransformerBlock

    model = bench.models["sdxl"]
    network = model.model.diffusion_model
    seen = []

    class Styled(BasicTransformerBlock):
        def forward(self, x, context=None, style_block=None, transformer_options={}):  # noqa: B006
            seen.append(style_block)
            return super().forward(x, context=context, transformer_options=transformer_options)

    expected = builders.sample(toma(model, **MERGED), **RUN)
    patched = toma(model, **MERGED)
    blocks = [module for module in network.modules() if isinstance(module, BasicTransformerBlock)]
    calls = type(blocks[0]).__call__

    class Called(Styled):
        def __call__(self, x, **given):
            return calls(self, x, style_block="style", **given)

    before = [type(block) for block in blocks]
    try:
        for block in blocks:
            block.__class__ = Called
        assert torch.equal(builders.sample(patched, **RUN), expected)
    finally:
        for block, kind in zip(blocks, before):
            block.__class__ = kind
    assert told(patched).tokens and set(seen) == {"style"}
