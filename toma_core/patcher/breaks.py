"""Where a forecast must not cross: the sigmas at which a conditioning, a ControlNet or a hook begins or ends."""

from __future__ import annotations

from collections.abc import Iterator


def phase_of(conds: dict[str, list[dict]] | None, sigma: float) -> tuple[bool, ...]:
    """What is at work at `sigma`, of a guider's processed conditionings: equal for two sigmas if nothing begins or ends
    between them."""
    found: list[bool] = []
    for several in (conds or {}).values():
        for cond in several or ():
            start, end = cond.get("timestep_start"), cond.get("timestep_end")
            found.append(start is None or sigma <= start)
            found.append(end is None or sigma >= end)
            found.extend(start >= sigma >= end for start, end in _controls(cond.get("control")))
            found.extend(start >= sigma for start in _keyframes(cond.get("hooks")))
    return tuple(found)


def asked_for(options: dict) -> tuple[tuple[str, str], ...]:
    """The words in the options of an evaluation. Nodes that sample two latents at a time (FlowEdit, RES4LYF's guides)
    tell by one of them which is asked for; one's answers say nothing of the other's."""
    return tuple((name, value) for name, value in sorted(options.items()) if isinstance(value, str))


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
