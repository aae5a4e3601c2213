"""The only part of the method that knows ComfyUI: a MODEL goes in, a patched clone comes out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..merge import Select, reselect
from ..plan import Plan
from ..settings import Settings, SettingsError
from .account import Listener
from .families import UnsupportedModel, family_of
from .families.base import KEY, Unmerged
from .report import Handle
from .run import ADAPTIVE, Run

__all__ = ["UnsupportedModel", "family_of", "patch"]


def patch(
    model,
    settings: Settings,
    record: bool = False,
    listener: Listener | None = None,
    plan: Callable[[], Plan] | None = None,
    select: Select = reselect,
):
    """A clone of the ModelPatcher whose sampling runs are forecast and merged by the settings.

    With `record` the reports of its runs hold every pick and where forecasts were wrong; a `listener` is told of picks
    as they are made. `plan` and `select` put others in the place of ours, for benchmarks."""
    from comfy.patcher_extension import WrappersMP

    family = family_of(model)
    family = family.arrange(settings) if settings.ratio or plan else Unmerged.without_seams(family)
    if family.why_unmerged and settings.ratio and not settings.tolerance and plan is None:
        raise SettingsError(
            f"tolerance is 0, so nothing would be forecast, and tokens can't be merged: {family.why_unmerged}. "
            "Set tolerance above 0, for instance to 0.03."
        )
    if KEY in model.model_options:
        logging.info("ToMA: there is a ToMA node before this one; only the last one counts.")
    model = model.clone()
    handle = Handle(settings)
    model.model_options[KEY] = handle

    def new_run() -> Run:
        return Run(settings, family, record, listener, plan() if plan else None, select)

    # In the options, not among the patcher's wrappers: nodes that make a patcher anew leave those behind.
    wrappers = model.model_options.setdefault("transformer_options", {}).setdefault("wrappers", {})
    wrappers.setdefault(WrappersMP.OUTER_SAMPLE, {})[KEY] = [partial(_sample, new_run, handle)]
    return model


def _sample(new_run: Callable[[], Run], handle: Handle, executor: Any, *args, **kwargs):
    """Wraps the sampler's outermost call: one run, whose state is in the options of this run only."""
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    guider = executor.class_obj
    before = guider.model_options
    run, own = new_run(), create_model_options_clone(before)
    sigmas = kwargs.get("sigmas", args[3] if len(args) > 3 else None)
    run.has_steps = sigmas is None or len(sigmas) > 1
    if "adaptive" in _name_of(kwargs.get("sampler", args[2] if len(args) > 2 else None)):
        run.forecast_nothing(ADAPTIVE)
    options = own.setdefault("transformer_options", {})
    run.others.watch(options)
    run.family.install(options)
    add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, run.predict_noise, options)
    add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, run.network, options)
    if run.family.blocks:
        add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, run.merging.apply_model, options)
    guider.model_options = own
    finished = False
    try:
        out = executor(*args, **kwargs)
        _wait_for(out)
        finished = True
        return out
    finally:
        guider.model_options = before
        report = run.end(finished, _attention(options))
        report.sampled = guider.model_patcher.patches_uuid
        handle.reports.append(report)
        logging.info(report.sentence())


def _name_of(sampler: Any) -> str:
    """Of the function that samples, for instance sample_euler."""
    return getattr(getattr(sampler, "sampler_function", None), "__name__", "")


def _wait_for(out: object) -> None:
    """Returns when a sampled latent is really there: a device works on after the host has asked it to."""
    if isinstance(out, Tensor) and out.numel():
        out.flatten()[:1].cpu()


def _attention(options: dict) -> str:
    """The attention that ComfyUI has selected."""
    from comfy.ldm.modules.attention import optimized_attention

    # a pack may put any callable there
    name = getattr(optimized_attention, "__name__", type(optimized_attention).__name__).removeprefix("attention_")
    return f"attention: {name}" + (" (overridden by another node)" if "optimized_attention_override" in options else "")
