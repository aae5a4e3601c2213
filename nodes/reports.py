"""The reports that a sampled MODEL carries, or a sentence that says why there are none."""

from __future__ import annotations

from torch import Tensor

from ..toma_core.patcher.families.base import KEY
from ..toma_core.patcher.report import Report


def reports_of(model, name: str) -> list[Report]:
    """The runs of a model, oldest first. `name` is the input it came in by, for the message."""
    handle = model.model_options.get(KEY)
    if handle is None:
        raise ValueError(
            f"{name} has no ToMA: connect the model that comes out of a ToMA node and goes into the sampler. "
            "To time an unmerged run, give it a ToMA node with preset custom and ratio 0."
        )
    if not handle.reports:
        raise ValueError(
            f"{name} has not been sampled with: connect the same model to a sampler, and what that sampler "
            "made to this node."
        )
    return list(handle.reports)


def made_by(reports: list[Report], pictures: Tensor, model) -> Report:
    """The latest run whose latents decode to pictures [B, H, W, 3] of this size, for several samplers may have
    used the model (a hi-res pass); the latest of all if none does, as when the pictures were scaled after."""
    side = getattr(getattr(model.model, "latent_format", None), "spacial_downscale_ratio", 8)
    size = tuple(pictures.shape[1:3])
    fitting = [report for report in reports if tuple(side * part for part in report.latent) == size]
    return (fitting or reports)[-1]
