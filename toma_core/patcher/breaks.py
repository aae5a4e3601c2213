"""Where a forecast must not cross: the sigmas at which a conditioning, a ControlNet or a hook begins or ends."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def phase_of(conds: dict[str, list[dict]] | None, sigma: float) -> tuple[bool, ...]:
    """What is at work at `sigma`, of a guider's processed conditionings: equal for two sigmas if nothing begins or ends
    between them."""
    found: list[bool] = []
    for several in (conds or {}).values():
        for cond in several or ():
            bounds = [(cond.get("timestep_start"), cond.get("timestep_end")), *_controls(cond.get("control"))]
            bounds += [(start, None) for start in _keyframes(cond.get("hooks"))]
            for start, end in bounds:
                found.append(start is None or sigma <= _as_met(start))
                found.append(end is None or sigma >= _as_met(end))
    return tuple(found)


def _as_met(bound: float) -> float:
    """A bound as ComfyUI compares it with a sigma, which is fp32: often it is that sigma, but for rounding."""
    return torch.as_tensor(bound, dtype=torch.float32).item()  # Stable Cascade gives a tensor


def asked_for(options: dict) -> tuple[tuple[str, str], ...]:
    """The words in the options of an evaluation. Nodes that sample two latents at a time (FlowEdit, RES4LYF's guides)
    tell by one of them which is asked for; one's answers say nothing of the other's."""
    return tuple(sorted((str(name), value) for name, value in options.items() if isinstance(value, str)))


def _controls(control) -> Iterator[tuple[float, float]]:
    """The sigmas of a ControlNet and of those before it in its chain."""
    while control is not None:
        if getattr(control, "timestep_range", None) is not None:
            yield control.timestep_range
        control = getattr(control, "previous_controlnet", None)


def _keyframes(hooks) -> Iterator[float]:
    """The sigmas from which the keyframes of hooks (a LoRA by schedule) count."""
    for hook in getattr(hooks, "hooks", ()):
        for frame in getattr(getattr(hook, "hook_keyframe", None), "keyframes", ()):
            yield frame.start_t
