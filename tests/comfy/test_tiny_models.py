"""Every tiny model of the table builds and samples as it is, without the pack: the ground for tests of families."""

import pytest
import tiny_models
import torch


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
    assert [tuple(part.shape) for part in first] == [(1, *shape) for shape in shapes]
    assert all(part.isfinite().all() and part.std() > 0 for part in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_no_weight_is_zero(comfy):
    for name in tiny_models.available():
        model = tiny_models.build(name).model.diffusion_model
        zero = [key for key, weight in model.named_parameters() if weight.numel() and not weight.any()]
        assert not zero, name
