"""Every tiny model of the table builds and samples as it is, without the pack: the ground for tests of families."""

import pytest
import tiny_models
import torch

# of ComfyUI's own code
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def parts(latent) -> list[torch.Tensor]:
    """The tensors of a latent, nested or not."""
    return list(latent.unbind()) if latent.is_nested else [latent]


@pytest.mark.parametrize("name", tiny_models.available())
def test_builds_and_samples(comfy, name):
    case, model = tiny_models.CASES[name], tiny_models.build(name)
    assert type(model.model.model_config).__name__ == case.kind

    first, second = (parts(tiny_models.sample(case, model)) for _ in range(2))

    shapes = case.result or case.shape
    shapes = shapes if isinstance(shapes[0], tuple) else (shapes,)
    assert [tuple(part.shape) for part in first] == [(case.batch, *shape) for shape in shapes]
    assert all(part.isfinite().all() and part.std() > 0 for part in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("name", tiny_models.available())
def test_no_weight_is_zero(comfy, name):
    network = tiny_models.build(name).model.diffusion_model
    assert not [key for key, weight in network.named_parameters() if weight.numel() and not weight.any()]


def test_every_model_is_in_the_table(comfy):
    """A class that a new release adds asks for an entry, or for the reason why it has none."""
    import comfy.supported_models

    known = {case.kind for case in tiny_models.CASES.values()} | set(tiny_models.NOT_SAMPLED)
    assert {kind.__name__ for kind in comfy.supported_models.models} <= known
