"""The only rooms that know ComfyUI: a MODEL goes in, a patched clone comes out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..settings import Settings
from .run import KEY, Family, Handle, Listener, Run, network_of


class UnsupportedModel(ValueError):
    """A model without a token seam that we know; the message says what it is and what works."""


def family_of(model) -> type[Family]:
    """The family of a ModelPatcher's diffusion model."""
    from .flux import FluxFamily
    from .unet import UNetFamily

    network = network_of(model)
    if network is None:
        raise UnsupportedModel(
            f"model is a {type(model).__name__}, not a diffusion model: connect the MODEL of a loader."
        )
    for family in (UNetFamily, FluxFamily):
        if family.matches(network):
            return family
    raise UnsupportedModel(
        f"model is a {type(model.model).__name__} ({type(network).__name__}), which ToMA can't merge. "
        f"It works with {UNetFamily.description} and {FluxFamily.description}."
    )


def patch(model, settings: Settings, record: bool = False, listener: Listener | None = None):
    """A clone of the ModelPatcher whose sampling runs merge tokens.

    With `record` the reports of its runs hold every pick; a `listener` is told of them as they are made."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    family = family_of(model)(model, settings)
    model = model.clone()
    handle = Handle(settings)
    family.apply(model)
    model.model_options[KEY] = handle
    model.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    new_run = partial(Run, settings, family, record, listener)
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, partial(_sample, new_run, handle))
    on_copy = getattr(CallbacksMP, "ON_DEEPCLONE_MULTIGPU", None)
    if on_copy is not None:
        model.add_callback_with_key(on_copy, KEY, partial(_reseat, family))
    return model


def _reseat(family: Family, original, copy) -> None:
    family.forget(copy)
    family.apply(copy)


def _sample(new_run: Callable[[], Run], handle: Handle, executor: Callable, *args, **kwargs):
    """Wraps the sampler's outermost call: one run, whose state is in the options of this run only."""
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    guider = executor.class_obj
    before = guider.model_options
    guider.model_options = create_model_options_clone(before)
    options = guider.model_options.setdefault("transformer_options", {})
    run = new_run()
    run.family.install(options)
    add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, run.apply_model, options)
    finished = False
    try:
        out = executor(*args, **kwargs)
        _wait_for(out)
        finished = True
        return out
    finally:
        guider.model_options = before
        report = run.end(finished, _attention(options))
        handle.reports.append(report)
        logging.info(report.sentence())


def _wait_for(out: object) -> None:
    """Returns when a sampled latent is really there: a device works on after the host has asked it to."""
    if isinstance(out, Tensor) and out.numel():
        out.flatten()[:1].cpu()


def _attention(options: dict) -> str:
    """The attention that ComfyUI has selected."""
    from comfy.ldm.modules.attention import optimized_attention

    name = optimized_attention.__name__.removeprefix("attention_")
    return f"attention: {name}" + (
        " (overridden by another node)" if "optimized_attention_override" in options else ""
    )
