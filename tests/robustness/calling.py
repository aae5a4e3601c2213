"""What the tests of habits and odd callers share: patched models, their reports, and ComfyUI's nodes by name."""

from __future__ import annotations

import inspect

import builders
import torch
from comfy_here import finish

MERGED = {"reselect_every": 2, "skip_first_blocks": 0}
FORECAST = {"ratio": 0.0, "tolerance": 0.3}
RUN = {"steps": 8, "cfg": 2.0}


def toma(model, listener=None, **settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    return patch(model, Settings(**settings), listener=listener)


def told(model):
    """The report of the last run."""
    return model.model_options["toma"].reports[-1]


def says_what_it_did(report) -> None:
    """Forecasts, merged tokens, or a reason, each said once."""
    assert report.finished
    assert report.counts["forecast"] or report.tokens or report.notes, report.sentence()
    assert len(set(report.notes)) == len(report.notes)


def node(name: str, **inputs) -> tuple:
    """The outputs of one of ComfyUI's nodes, whichever way it is written."""
    import nodes

    kind = nodes.NODE_CLASS_MAPPINGS[name]
    if hasattr(kind, "define_schema"):
        result = kind.PREPARE_CLASS_CLONE(None).execute(**inputs)
    else:
        result = getattr(kind(), kind.FUNCTION)(**inputs)
    if inspect.iscoroutine(result):
        result = finish(result)
    result = result.get("result", ()) if isinstance(result, dict) else result
    return result if isinstance(result, tuple) else getattr(result, "result", result)


def guided(guider, sampler, model, steps: int = 8, seed: int = 0) -> torch.Tensor:
    """A run of a guider with a sampler function (model, x, sigmas, extra_args, callback, disable)."""
    import comfy.sample
    import comfy.samplers

    latent = builders.empty_latent(model)
    noise = comfy.sample.prepare_noise(latent, seed)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    return guider.sample(noise, latent, comfy.samplers.KSAMPLER(sampler), sigmas, disable_pbar=True, seed=seed)
