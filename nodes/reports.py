"""The reports that a sampled MODEL carries, or a sentence that says why there are none."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..toma_core.patcher.families.base import KEY
from ..toma_core.patcher.report import ErrorMap, Report


class NoRun(Exception):
    """There is no run to show; the message says why. The images that came along are as they were: a ToMA node that is
    bypassed must not end the prompt."""


def reports_of(model, name: str) -> list[Report]:
    """The runs of a model, oldest first. `name` is the input it came in by, for the message."""
    handle = model.model_options.get(KEY)
    if handle is None:
        raise NoRun(
            f"{name} has no ToMA (is it bypassed?): connect the model that comes out of a ToMA node and goes into the "
            "sampler. To time a plain run, give it a ToMA node with preset custom, ratio 0 and tolerance 0."
        )
    if not handle.reports:
        raise NoRun(
            f"{name} was not sampled: put ToMA last before the sampler, and connect the same model to the sampler and "
            "to this node."
        )
    return list(handle.reports)


def made_by(reports: list[Report], images: Tensor, model) -> Report:
    """The latest run of this model whose latents decode to images [B, H, W, 3] of this size, for several samplers may
    have used the model (a hi-res pass), or branches of it with LoRAs of their own; the latest of all if none does, as
    when the images were scaled after."""
    reports = [report for report in reports if report.sampled == model.patches_uuid] or reports
    side = getattr(getattr(model.model, "latent_format", None), "spacial_downscale_ratio", 8)
    size = tuple(images.shape[1:3])
    fitting = [report for report in reports if tuple(side * part for part in report.latent[-2:]) == size]
    return (fitting or reports)[-1]


def fits(report: Report, images: Tensor) -> bool:
    """Whether the latents of a run have the images' shape, up to one token of 2 x 2."""
    height, width = (report.latent if len(report.latent) > 1 else (0, 0))[-2:]
    return abs(width * images.shape[1] / images.shape[2] - height) <= 2


def error_maps(report: Report) -> list[ErrorMap]:
    """Those that can be drawn: latents of images and videos, not several packed into one. What is no number is 0."""
    drawable = (found for found in report.error_maps if found.error.ndim == 4)
    return [replace(found, error=found.error.float().nan_to_num(0.0, 1e6, 0.0)) for found in drawable]


def why_unmerged(report: Report) -> str:
    """Why no tokens were merged in a run, in a sentence."""
    if not report.settings.ratio:
        return "No tokens were merged: ratio is 0 in these settings."
    said = [note for note in report.notes if "merged" in note]
    if said:
        return f"{said[0][0].upper()}{said[0][1:]}."
    if report.settings.tolerance:
        return "No tokens were merged: forecast and full steps alone kept within the tolerance."
    return "No tokens were merged: no step of this run lies between start_percent and end_percent."
