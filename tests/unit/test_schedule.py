"""The reuse schedule, and where an evaluation lies on the sampler's own."""

import json
from pathlib import Path

import pytest
from comfyui_toma.toma_core.plan import Action, Kind, Moment, ReuseSchedule, moment_at, noise_level, step_of
from hypothesis import given
from hypothesis import strategies as st
from schedules import table

TABLE = Path(__file__).parent / "schedule_table.json"
SETTINGS = [
    ReuseSchedule(1, 1, 0.0, 1.0),
    ReuseSchedule(10, 5, 0.0, 1.0),
    ReuseSchedule(4, 3, 0.2, 0.6),
    ReuseSchedule(3, 7, 0.35, 0.95),
    ReuseSchedule(2, 1, 0.5, 0.5),
    ReuseSchedule(5, 2, 0.0, 0.05),
]
STEPS = [1, 2, 4, 7, 20, 28, 50]
LETTERS = {Action.NONE: ".", Action.RESELECT: "S", Action.REWEIGHT: "w", Action.REUSE: "r"}


def letters(schedule: ReuseSchedule, steps: int) -> str:
    return "".join(LETTERS[action] for action in table(schedule, steps))


def test_tables_as_a_reader_would_write_them():
    assert letters(ReuseSchedule(10, 5), 20) == "SrrrrwrrrrSrrrrwrrrr"
    assert letters(ReuseSchedule(1, 1), 4) == "SSSS"
    assert letters(ReuseSchedule(4, 2), 10) == "SrwrSrwrSr"
    assert letters(ReuseSchedule(4, 3), 10) == "SrrwSrrwSr"
    assert letters(ReuseSchedule(10, 5, 0.0, 0.6), 20) == "SrrrrwrrrrSr........"
    assert letters(ReuseSchedule(4, 2, 0.5, 1.0), 8) == "....Srwr"
    assert letters(ReuseSchedule(4, 2, 0.3, 0.3), 8) == "........"
    assert letters(ReuseSchedule(2, 2, 0.0, 0.9), 8) == "SrSrSrS.", "the last step is left alone"
    assert letters(ReuseSchedule(2, 2, 0.0, 0.9), 4) == "SrS."


def entry(schedule: ReuseSchedule, steps: int) -> dict:
    names = ("reselect_every", "reweight_every", "start_percent", "end_percent")
    actions = [action.value for action in table(schedule, steps)]
    return {**{name: getattr(schedule, name) for name in names}, "steps": steps, "table": actions}


def test_the_file_that_the_front_end_shares():
    """If the rule changes on purpose, write it anew: TABLE.write_text(json.dumps([entry(...), ...]))"""
    wanted = [entry(schedule, steps) for schedule in SETTINGS for steps in STEPS]
    assert json.loads(TABLE.read_text(encoding="utf-8")) == wanted


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("schedule", SETTINGS)
def test_active_steps_are_merged_and_nothing_is_forecast(schedule, merges):
    """Whatever it is told: the reuse schedule knows no errors."""
    plan = ReuseSchedule(*(getattr(schedule, f) for f in schedule.__dataclass_fields__ if f != "merges"), merges=merges)
    for step in range(20):
        kind = plan.next(Moment(step, 20, step / 20, 0.1), [0.0, 0.01]).kind
        assert kind is (Kind.MERGED if merges and schedule.active(step, 20) else Kind.FULL)
        assert plan.learn(0.0) is None
        plan.restart()
    assert not any(plan.active(step, 20) for step in range(20)) or merges


schedules = st.builds(
    ReuseSchedule,
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 100).map(lambda p: p / 100),
    st.integers(0, 100).map(lambda p: p / 100),
)


@given(schedules, st.integers(1, 100))
def test_active_is_what_lies_between_start_and_end(schedule, steps):
    start, end = (round(p * 100) for p in (schedule.start_percent, schedule.end_percent))
    for step, action in enumerate(table(schedule, steps)):
        # in whole numbers, without rounding
        active = start * steps <= step * 100 and (step + 1) * 100 <= end * steps
        assert (action is not Action.NONE) == active


@given(schedules, st.integers(1, 100))
def test_the_first_active_step_reselects_and_counts_restart_there(schedule, steps):
    active = [action for action in table(schedule, steps) if action is not Action.NONE]
    since_pick = since_weigh = None
    for action in active:
        if action is Action.RESELECT:
            assert since_pick in (None, schedule.reselect_every)
            since_pick = since_weigh = 0
        elif action is Action.REWEIGHT:
            assert since_weigh == schedule.reweight_every
            since_weigh = 0
        assert since_pick < schedule.reselect_every and since_weigh < schedule.reweight_every
        since_pick, since_weigh = since_pick + 1, since_weigh + 1


def test_percent_of_steps_does_not_stumble_over_floats():
    for steps in range(1, 200):
        for percent in range(101):
            first, end = ReuseSchedule(1, 1, percent / 100, percent / 100).span(steps)
            assert (first, end) == (-(-percent * steps // 100), percent * steps // 100)


KARRAS = [14.6146, 9.8, 6.4, 4.1, 2.5, 1.5, 0.85, 0.46, 0.23, 0.1, 0.03, 0.0]
FLOW = [1.0, 0.98, 0.95, 0.9, 0.8, 0.6, 0.3, 0.0]


@pytest.mark.parametrize("sigmas", [KARRAS, FLOW, [i / 1000 for i in range(1000, -1, -1)]])
def test_scheduled_calls_are_their_step_even_in_half_precision(sigmas):
    import torch

    for step, sigma in enumerate(sigmas[:-1]):
        assert step_of(sigma, sigmas) == step
        if len(sigmas) < 100:
            for rounded in (sigma * (1 + 9e-4), sigma * (1 - 9e-4), float(torch.tensor(sigma).half())):
                assert step_of(rounded, sigmas) == step


@pytest.mark.parametrize("sigmas", [KARRAS, FLOW])
def test_calls_between_sigmas_belong_to_the_step_before(sigmas):
    for step, (high, low) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        for share in (0.05, 0.5, 0.95):
            assert step_of(high + share * (low - high), sigmas) == step


def test_calls_outside_the_schedule():
    assert step_of(17.0, KARRAS) == 0, "noise was added"
    assert step_of(0.0, KARRAS) == len(KARRAS) - 2
    assert step_of(0.01, KARRAS) == len(KARRAS) - 2
    part = KARRAS[3:7]  # a run that ends before sigma 0
    assert step_of(part[-1], part) == len(part) - 2
    assert step_of(0.1, part) == len(part) - 2


def test_repeated_and_unsorted_sigmas():
    assert step_of(5.0, [9.0, 5.0, 5.0, 1.0, 0.0]) == 2
    assert step_of(3.0, [9.0, 5.0, 5.0, 1.0, 0.0]) == 2
    zigzag = [10.0, 5.0, 7.0, 3.0, 0.0]
    assert [step_of(sigma, zigzag) for sigma in zigzag[:-1]] == [0, 1, 2, 3]
    rising = [0.0, 1.0, 3.0, 9.0]  # noise is put in
    assert [step_of(sigma, rising) for sigma in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)] == [0, 0, 1, 1, 2, 2]


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=30), st.floats(0, 200))
def test_any_call_has_one_step(sigmas, sigma):
    assert 0 <= step_of(sigma, sigmas) < len(sigmas) - 1


def test_noise_level():
    """The share of noise in what the model sees, 0 to 1 in both worlds."""
    assert [noise_level(s, flow=True) for s in (0.0, 0.25, 1.0, 1.5, -0.1)] == [0.0, 0.25, 1.0, 1.0, 0.0]
    assert [noise_level(s, flow=False) for s in (0.0, 1.0, 3.0)] == [0.0, 0.5, 0.75]


@pytest.mark.parametrize("sigmas,flow", [(KARRAS, False), (FLOW, True)])
def test_moments_of_a_schedule(sigmas, flow):
    """Places rise to 1, and the weights are the shares of the remaining noise that the steps remove."""
    moments = [moment_at(sigma, sigmas, flow) for sigma in sigmas[:-1]]
    assert [m.step for m in moments] == list(range(len(sigmas) - 1))
    assert {m.steps for m in moments} == {len(sigmas) - 1}
    places = [m.place for m in moments]
    assert places == sorted(places) and places[0] == pytest.approx(1 - noise_level(sigmas[0], flow))
    assert moments[-1].weight == 1.0 and all(0 < m.weight < 1 for m in moments[:-1])
    left = noise_level(sigmas[0], flow)
    for moment, after in zip(moments, sigmas[1:]):
        left *= 1 - moment.weight
        assert left == pytest.approx(noise_level(after, flow), abs=1e-9)


def test_moments_between_scheduled_sigmas_and_off_them():
    between = moment_at(0.7, FLOW, True)
    assert between.step == 4 and between.place == pytest.approx(0.3)
    assert between.weight == pytest.approx(1 - 0.6 / 0.7)
    assert moment_at(0.6 * 1.0004, FLOW, True).weight == pytest.approx(0.5, abs=1e-3), (
        "rounded up it is no step of its own"
    )
    assert moment_at(0.0, FLOW, True).weight == 1.0
    part = moment_at(0.8, [1.0, 0.9, 0.8, 0.6], True)  # a run that ends before sigma 0
    assert (part.step, part.steps) == (2, 3) and part.weight == pytest.approx(0.25)
