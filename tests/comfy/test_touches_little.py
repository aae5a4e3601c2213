"""What a run leaves alone: blocks where nothing is merged, the device's queue, calls that are not its own."""

import builders
import pytest
import torch
from told import report

RUN = {"width": 64, "height": 64, "steps": 12, "cfg": 2.0}


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_where_nothing_is_merged_no_block_is_touched(models, merged, name):
    """So that a compiled model keeps its graphs, and other nodes their places."""
    touched = []

    def look(apply_model, args):
        options = args["c"]["transformer_options"]
        touched.append(bool(options.get("patches_replace", {}).get("dit")) or "toma" in options)
        touched.append(any("forward" in module.__dict__ for module in models[name].model.diffusion_model.modules()))
        return apply_model(args["input"], args["timestep"], **args["c"])

    for ratio, wanted in ((0.0, False), (0.5, True)):
        model = merged(models[name], ratio=ratio, tolerance=0.9)
        model.set_model_unet_function_wrapper(look)
        builders.sample(model, **RUN)
        assert any(touched) is wanted, ratio
        assert report(model).counts["forecast"] > 0
        touched.clear()


def test_a_model_call_that_is_not_for_the_guider_keeps_nothing(models, merged):
    """In training the latent asks for gradients: each call would leave a clean estimate behind, and its graph."""
    from comfyui_toma.toma_core.patcher.families import family_of
    from comfyui_toma.toma_core.patcher.run import Run
    from comfyui_toma.toma_core.settings import Settings

    settings = Settings(ratio=0.5, tolerance=0.3)
    run = Run(settings, family_of(models["flux"]).arrange(settings))
    asked = []

    class Executor:
        class_obj = models["flux"].model

        def __call__(self, x, *args, **kwargs):
            asked.append(args)
            return x * 2

    x = torch.zeros(1, 16, 8, 8, requires_grad=True)
    for _ in range(3):
        out = run.merging.apply_model(Executor(), x, torch.ones(1), transformer_options={"sigmas": torch.ones(1)})
    assert len(asked) == 3 and out.requires_grad and not run.merging.states
    assert not run.merging.passes and not run.merging.networks


def test_a_failure_while_blocks_are_wrapped_unwraps_them(models):
    from comfyui_toma.toma_core.patcher.families.base import seams_on

    block = torch.nn.Linear(2, 2)

    class Broken:
        def seams(self, network):
            yield block, lambda forward: lambda *args: forward(*args)
            raise AttributeError("no such block")

    with pytest.raises(AttributeError):
        seams_on(Broken(), block)
    assert "forward" not in block.__dict__


def test_a_network_with_other_blocks_is_left_alone(models, merged):
    """Of a guider with two models the second may be of the same class, and shorter."""
    from comfyui_toma.toma_core.patcher.families import family_of
    from comfyui_toma.toma_core.settings import Settings

    sdxl, sd15 = models["sdxl"], models["sd15"]
    family = family_of(sdxl).arrange(Settings())
    assert list(family.seams(sdxl.model.diffusion_model)) and not list(family.seams(sd15.model.diffusion_model))


def test_inside_the_network_nothing_is_read(models, merged):
    """Our seams in merged calls: nothing waits for the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, list[str]] = {"plain": [], "merged": []}

    class Reads(TorchDispatchMode):
        def __init__(self, into: list) -> None:
            super().__init__()
            self.into = into

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name in (
                "_local_scalar_dense",
                "nonzero",
                "sort",
                "topk",
                "scatter",
                "scatter_add",
                "index_put",
                "equal",
            ):
                self.into.append(name)
            return func(*args, **(kwargs or {}))

    for name in ("flux", "sdxl"):
        for which, model in (("plain", models[name]), ("merged", merged(models[name], ratio=0.5, reselect_every=2))):
            model = model.clone()

            def watched(apply_model, args, into=found[which]):
                with Reads(into):
                    return apply_model(args["input"], args["timestep"], **args["c"])

            model.set_model_unet_function_wrapper(watched)
            builders.sample(model, **{**RUN, "steps": 4})
    assert found["merged"] == found["plain"]
