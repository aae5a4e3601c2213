"""Fixtures of the integration tests: models that are built once, and `merged`, which patches one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def models(comfy, tmp_path_factory):
    """Name -> tiny model. Shared by all tests: that none of them leaves anything behind is part of the point."""
    import builders
    import models as tiny

    folder = tmp_path_factory.mktemp("models")
    return {
        "flux": builders.tiny_flux(folder / "flux.safetensors", hidden=128, depth=2, depth_single=3),
        "sdxl": builders.tiny_sdxl(),
        "sd15": builders.tiny_sd15(),
        "flux2": tiny.tiny_flux2(),
        "chroma": tiny.tiny_chroma(),
    }


@pytest.fixture(scope="session")
def merged(comfy):
    """merged(model, **settings): the model patched, by default half of the tokens in every block."""
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    def patched(model, **settings):
        return patch(model, Settings(**{"skip_first_blocks": 0, "reselect_every": 3, **settings}))

    return patched


@pytest.fixture(scope="module")
def plain(comfy):
    """plain(name, **size): the latent of a tiny model without the pack, sampled once."""
    import tiny_models

    known: dict = {}

    def sampled(name: str, **size):
        key = (name, *size.items())
        if key not in known:
            known[key] = tiny_models.sample(tiny_models.CASES[name], tiny_models.build(name), **size)
        return known[key]

    return sampled


@pytest.fixture(scope="module")
def patched(comfy):
    """patched(name, ratio, ...): the tiny model with the pack."""
    import tiny_models
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    def make(name: str, model=None, select=None, **settings):
        options = {"select": select} if select else {}
        return patch(model or tiny_models.build(name), Settings(**{"reselect_every": 1, **settings}), **options)

    return make
