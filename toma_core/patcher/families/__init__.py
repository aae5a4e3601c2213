"""Where the blocks of a model are, and how to reach them."""

from __future__ import annotations

from .base import Family, Unmerged, network_of
from .dit import DiTFamily
from .entry import Entry
from .table import entry_of
from .unet import UNetFamily

__all__ = ["Family", "UnsupportedModel", "family_of", "network_of"]


class UnsupportedModel(ValueError):
    """What came in by a MODEL input is no diffusion model."""


def family_of(model) -> Family:
    """The family of a ModelPatcher's network; of one whose tokens can't be merged, a family that says why."""
    network = network_of(model)
    if network is None or not hasattr(model.model, "model_sampling"):
        raise UnsupportedModel(
            f"model is a {type(model).__name__}, not a diffusion model: connect the MODEL of a loader."
        )
    name = type(model.model).__name__
    if UNetFamily.matches(network):
        why = UNetFamily.why_never(network)
        return Unmerged(name, why) if why else UNetFamily(network)
    found = entry_of(network)
    if isinstance(found, Entry):
        return DiTFamily(network, found)
    return Unmerged(name, found or f"it is not known where those of {name} ({type(network).__name__}) lie")
