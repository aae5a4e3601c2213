"""The conditioning of the cases: functions of (model, width, height) -> (positive, negative)."""

from __future__ import annotations

import builders
import torch


def plain(model, width, height):
    return builders.conditioning(model, 1), builders.conditioning(model, 2)


def lengths(model, width, height):
    return builders.conditioning(model, 1, tokens=13), builders.conditioning(model, 2, tokens=29)


def area(model, width, height):
    import nodes

    half = nodes.ConditioningSetArea().append(builders.conditioning(model, 3), width // 2, height, 0, 0, 1.0)[0]
    return builders.conditioning(model, 1) + half, builders.conditioning(model, 2)


def mask(model, width, height):
    import nodes

    left = torch.zeros(1, height // 8, width // 8)
    left[:, :, : width // 16] = 1
    part = nodes.ConditioningSetMask().append(builders.conditioning(model, 3), left, "default", 1.0)[0]
    return builders.conditioning(model, 1) + part, builders.conditioning(model, 2)


def late(model, width, height):
    import nodes

    later = nodes.ConditioningSetTimestepRange().set_range(builders.conditioning(model, 3), 0.5, 1.0)[0]
    early = nodes.ConditioningSetTimestepRange().set_range(builders.conditioning(model, 1), 0.0, 0.5)[0]
    return early + later, builders.conditioning(model, 2)


def control(model, width, height):
    import models

    make = models.control_sdxl if "model_channels" in model.model.model_config.unet_config else models.control_flux
    positive, negative = plain(model, width, height)
    network = make(model)
    return tuple(models.with_control(cond, network, width, height) for cond in (positive, negative))


def _with_references(model, width, height, count, **extra):
    generator = torch.Generator().manual_seed(4)
    shape = builders.empty_latent(model, width, height).shape
    latents = [torch.randn(shape, generator=generator) for _ in range(count)]
    extra["reference_latents"] = latents
    return builders.conditioning(model, 1, **extra), builders.conditioning(model, 2, **extra)


def reference(model, width, height):
    return _with_references(model, width, height, 1)


def two_references(model, width, height):
    return _with_references(model, width, height, 2)


def reference_zero(model, width, height):
    return _with_references(model, width, height, 1, reference_latents_method="index_timestep_zero")


def attention_mask(model, width, height):
    """As Redux and regional prompts make it: some text tokens weigh less."""
    tokens = builders.TEXT_TOKENS + (height // 16) * (width // 16)
    weights = torch.ones(tokens, tokens)
    weights[builders.TEXT_TOKENS :, : builders.TEXT_TOKENS // 2] = 0.05
    return builders.conditioning(model, 1, attention_mask=weights.log()[None]), builders.conditioning(model, 2)
