"""torch.compile through ComfyUI's own node: the same picture, merged, and no graph after each kind of step's first.

The backend `eager` runs dynamo with all its graphs and guards and leaves out only the C++ compiler.
"""

import types

import builders
import inductor
import pytest
import torch
from composing import far, small_sdxl

RUN = {"width": 128, "height": 128, "cfg": 2.0}
# Three steps a turn: one that runs unmerged and picks, two merged. The second turn must find all graphs made.
STEPS, TURN = 6, 3


@pytest.fixture(scope="module")
def models(comfy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    flux = builders.tiny_flux(folder / "flux.safetensors", hidden=128, depth=1, depth_single=1)
    return {"flux": flux, "unet": small_sdxl()}


def compiled(model, backend: str = "eager"):
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    node = TorchCompileModel
    result = node.execute(model, backend) if hasattr(node, "execute") else node().patch(model, backend)
    return getattr(result, "result", result)[0]


def merged(model, **settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    return patch(model, Settings(**{"reselect_every": TURN, "skip_first_blocks": 0, **settings}))


def sample_counting_graphs(model) -> tuple[torch.Tensor, list[int]]:
    from torch._dynamo.utils import counters

    graphs = []
    out = builders.sample(
        model, **RUN, steps=STEPS, callback=lambda *_: graphs.append(counters["stats"]["unique_graphs"])
    )
    return out, graphs


CASES = [
    ("flux", lambda m, **s: compiled(merged(m, **s)), {}),
    ("unet", lambda m, **s: merged(compiled(m), **s), {}),
    ("unet", lambda m, **s: compiled(merged(m, **s)), {"merge": "each layer"}),
]


@pytest.mark.parametrize("name,order,settings", CASES, ids=["flux after", "unet before", "unet each layer"])
def test_compiled_it_still_merges_and_never_recompiles(models, figure, name, order, settings):
    model = models[name]
    expected = builders.sample(merged(model, **settings), **RUN, steps=STEPS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if name == "flux":
        builders.sample(compiled(model), **RUN, steps=1)  # leaves a graph of the model without ToMA
    patched = order(model, **settings)
    out, graphs = sample_counting_graphs(patched)
    report = patched.model_options["toma"].reports[-1]
    assert report.tokens and all(after < before for before, after in report.tokens.values())
    assert (out - expected).norm() < 1e-4 * expected.norm()
    assert graphs[0] > 1, "nothing was compiled"
    assert graphs[TURN - 1] == graphs[-1], f"graphs after each step: {graphs}"
    again, more = sample_counting_graphs(patched)
    assert more[-1] == graphs[-1], "a second run compiled again"
    assert torch.equal(out, again)
    where = settings.get("merge", "whole block")
    figure(f"torch.compile, {name}, {where}", f"{graphs[-1]} graphs, none after step {TURN}")


def test_attention_only_on_flux_runs_uncompiled(models):
    """Inside of a compiled block nothing would tell its patches from none: it still merges."""
    from comfyui_toma.toma_core.settings import SettingsError

    settings = {"merge": "attention only"}
    try:
        expected = builders.sample(merged(models["flux"], **settings), **RUN, steps=2)
    except SettingsError as error:
        assert "attention only" in str(error)  # ComfyUI 0.16 has no attention patches in Flux
        return
    patched = compiled(merged(models["flux"], **settings))
    assert torch.equal(expected, builders.sample(patched, **RUN, steps=2))
    assert patched.model_options["toma"].reports[-1].tokens


def test_compiled_blocks_still_show_what_hooks_they_have(models):
    from comfyui_toma.toma_core.patcher.families.attention import AttentionSeam

    network = models["flux"].model.diffusion_model
    alone = types.SimpleNamespace(double_blocks=network.double_blocks)
    single = types.SimpleNamespace(double_blocks=[torch.compile(network.double_blocks[0], backend="eager")])
    assert AttentionSeam.fits(single) == AttentionSeam.fits(alone)


@pytest.mark.parametrize("name", ["flux", "unet"])
def test_a_compiled_network_on_the_shared_model(models, name):
    """Some packs compile the network by an object patch, which stays on the loaded model: ToMA knows the network
    in it, from that patcher and from the loader's."""
    model = models[name].clone()
    network = torch.compile(model.get_model_object("diffusion_model"), backend="eager")
    model.add_object_patch("diffusion_model", network)
    expected = builders.sample(merged(models[name]), **RUN, steps=2)
    first = merged(model)
    out = builders.sample(first, **RUN, steps=2)
    assert type(models[name].model.diffusion_model).__name__ == "OptimizedModule"
    for source in (model, models[name]):
        again = merged(source)
        assert far(builders.sample(again, **RUN, steps=2), expected) < 1e-4
        assert again.model_options["toma"].reports[-1].tokens
    assert far(out, expected) < 1e-4


def test_inductor_is_left_out_for_a_reason(monkeypatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: name)
    monkeypatch.setattr(inductor.os, "name", "posix")
    assert not inductor.why_not("/packs/torch") and "has a space" in inductor.why_not("/my packs/torch")
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    assert "there is none" in inductor.why_not("/packs/torch")


@pytest.mark.parametrize("order", ["before ToMA", "after ToMA"])
@pytest.mark.parametrize("name", ["lumina2", "qwen_image"])
def test_single_blocks_compiled_of_a_network_without_slots(comfy, name, order):
    """As KJNodes' TorchCompileModelAdvanced and RES4LYF's TorchCompileModels do: the compiled block has no signature
    of its own, and Lumina 2 gives its arguments by position."""
    import tiny_models
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    case, model = tiny_models.CASES[name], tiny_models.build(name)
    blocks = {"lumina2": "layers", "qwen_image": "transformer_blocks"}[name]
    count = len(model.model.diffusion_model.get_submodule(blocks))

    def with_compiled_blocks(model):
        model = model.clone()
        keys = [f"diffusion_model.{blocks}.{i}" for i in range(count)]
        set_torch_compile_wrapper(model, backend="eager", keys=keys)
        return model

    expected = tiny_models.sample(case, merged(model))
    patched = merged(with_compiled_blocks(model)) if order == "before ToMA" else with_compiled_blocks(merged(model))
    out = tiny_models.sample(case, patched)
    report = patched.model_options["toma"].reports[-1]
    assert report.tokens and not report.notes, report.sentence()
    assert (out - expected).norm() < 1e-4 * expected.norm()
    assert torch.equal(tiny_models.sample(case, merged(model)), expected), "the shared model has changed"


@pytest.mark.slow
@pytest.mark.skipif(bool(inductor.why_not()), reason=inductor.why_not())
def test_inductor(models, figure, tmp_path, monkeypatch):
    """The node's own default: graphs become C++. A full step is the same up to rounding; after it, tokens that are
    as good as each other may change places."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def sample(model) -> tuple[torch.Tensor, torch.Tensor]:
        """After the first step, and the picture."""
        made: list[torch.Tensor] = []
        out = builders.sample(model, **RUN, steps=TURN, callback=lambda _, x0, *__: made.append(x0.clone()))
        return made[0], out

    model = models["flux"]
    plain, expected = sample(model), sample(merged(model))
    torch._dynamo.reset()
    patched = compiled(merged(model), "inductor")
    out = sample(patched)
    made = list(tmp_path.rglob("*.so"))
    report = patched.model_options["toma"].reports[-1]
    assert made, "inductor compiled nothing"
    assert report.tokens and all(after < before for before, after in report.tokens.values())
    assert far(out[0], expected[0]) < 1e-4
    assert far(out[1], expected[1]) < 0.25 * far(expected[1], plain[1])
    figure("torch.compile, inductor, flux", f"{len(made)} libraries, merged, the same picture up to ties")
