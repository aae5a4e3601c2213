"""The reuse schedule written out: what each step of a run that merges whenever it may does about its merges."""

from __future__ import annotations

from comfyui_toma.toma_core.plan import Action, ReuseSchedule


def table(schedule: ReuseSchedule, steps: int) -> list[Action]:
    return [_action(schedule, step, steps) for step in range(steps)]


def _action(schedule: ReuseSchedule, step: int, steps: int) -> Action:
    if not schedule.active(step, steps):
        return Action.NONE
    merged = step - schedule.span(steps)[0]
    selected, weighed = schedule.turns(merged)
    if selected == merged:
        return Action.RESELECT
    return Action.REWEIGHT if weighed == merged else Action.REUSE
