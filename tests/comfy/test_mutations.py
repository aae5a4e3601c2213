"""Are the checks able to fail? The code is broken on purpose, one fault at a time, and a check must notice."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import test_breaks
import test_by_hand
import test_forecasts
import test_runs
import torch


def picks_of_one_prompt_for_the_other(patch):
    from comfyui_toma.toma_core.patcher.merging import Merging

    keys = Merging._keys
    patch.setattr(Merging, "_keys", lambda self, x, options: [key[1:] for key in keys(self, x, options)])


def picks_of_the_first_image_for_all(patch):
    from comfyui_toma.toma_core.evaluation import Evaluation

    choose = Evaluation.choose
    patch.setattr(Evaluation, "choose", lambda self, place, x, grid: choose(self, place, x[:1].expand_as(x), grid))


def chunks_in_the_wrong_order(patch):
    from comfyui_toma.toma_core.chunks import ChunkState

    gather = ChunkState.gather.__func__
    patch.setattr(ChunkState, "gather", classmethod(lambda cls, parts: gather(cls, parts[::-1])))


def stale_pick_after_a_change_of_grid(patch):
    from comfyui_toma.toma_core.evaluation import Block

    patch.setattr(Block, "merge_name", lambda self, grid: self.share)


def kept_outlives_the_run(patch):
    from comfyui_toma.toma_core.patcher.merging import Merging

    init = Merging.__init__

    class Lasting(dict):
        def clear(self) -> None:
            pass

    kept = Lasting()

    def shared(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.states = kept

    keys, keep = Merging._keys, Merging._keep

    def lasting(self, *args):
        keep(self, *args)
        kept.update(self.states)
        self.states = kept

    patch.setattr(Merging, "__init__", shared)
    patch.setattr(Merging, "_keep", lasting)
    patch.setattr(Merging, "_keys", lambda self, x, options: [key[1:] for key in keys(self, x, options)])


def history_of_another_run(patch):
    from comfyui_toma.toma_core.patcher.run import Run

    init, histories = Run.__init__, []

    def shared(self, *args, **kwargs):
        init(self, *args, **kwargs)
        histories.append(self.forecast)
        self.forecast = histories[0]

    patch.setattr(Run, "__init__", shared)
    patch.setattr(type(_forecast()), "forget", lambda self: None)


def _forecast():
    from comfyui_toma.toma_core.forecast import Forecast

    return Forecast()


def breaks_are_crossed(patch):
    from comfyui_toma.toma_core.patcher.run import Run

    patch.setattr(Run, "_changed", lambda self, *args: False)


def phases_are_not_seen(patch):
    from comfyui_toma.toma_core.patcher import run

    patch.setattr(run, "phase_of", lambda conds, sigma: ())


def history_of_another_size(patch):
    from comfyui_toma.toma_core.patcher.run import Run

    changed = Run._changed
    patch.setattr(
        Run, "_changed", lambda self, guider, x, *rest: changed(self, guider, torch.empty(0, dtype=x.dtype), *rest)
    )


def answers_of_other_nodes_are_history(patch):
    from comfyui_toma.toma_core.patcher.run import Run

    def network(self, executor, *args, **kwargs):
        self.images_run += 1
        return executor(*args, **kwargs)

    patch.setattr(Run, "network", network)
    # as if each evaluation had reached the network
    asked = property(lambda self: len(self.report.evaluations) + (self.merging.kind is None), lambda self, value: None)
    patch.setattr(Run, "images_run", asked, raising=False)


def further_passes_are_not_seen(patch):
    from comfyui_toma.toma_core.patcher.run import Run

    patch.setattr(Run, "images_each", property(lambda self: 0, lambda self, value: None), raising=False)


def own_noise_lost(patch):
    """The velocity of the destination for all its tokens, in the place of clean estimates."""
    from comfyui_toma.toma_core.patcher.merging import Merging

    patch.setattr(Merging, "_unmerged", lambda self, evaluation, out: out)


def last_clean_estimate_forgotten(patch):
    """U x0_kept alone."""
    from comfyui_toma.toma_core.patcher import merging

    patch.setattr(merging, "unmerged", lambda clean, last, merge: merge.unmerge(merge.take(clean)))


def kept_tokens_without_the_controlnets_part(patch):
    from comfyui_toma.toma_core.patcher.families.dit import DiTFamily

    patch.setattr(DiTFamily, "shorter_inputs", lambda self, evaluation, options, control: (options, None))


def controlnet_of_the_first_tokens(patch):
    from comfyui_toma.toma_core.patcher.families.dit import DiTFamily

    shorter = DiTFamily.shorter_inputs

    def first(self, evaluation, options, control):
        options, short = shorter(self, evaluation, options, control)
        if control is None:
            return options, None
        keep = next(iter(evaluation.state.merges.values())).kept.shape[1]
        return options, {k: [a if a is None else a[:, :keep] for a in adds] for k, adds in control.items()}

    patch.setattr(DiTFamily, "shorter_inputs", first)


def grade_of_the_wrong_step(patch):
    """As if the grade were that of the evaluation that is asked now."""
    from comfyui_toma.toma_core.patcher.run import Run

    read = Run._read

    def late(self, timestep):
        grade, self.grade = self.grade, getattr(self, "before", None)
        self.before = grade
        return read(self, timestep)

    patch.setattr(Run, "_read", late)


def graded_after_it_was_taken_in(patch):
    from comfyui_toma.toma_core.forecast import Forecast

    observe = Forecast.observe

    def blind(self, place, answer):
        had = bool(self.anchors)
        observe(self, place, answer)
        return torch.linalg.vector_norm(self.at(place) - answer) if had else None

    patch.setattr(Forecast, "observe", blind)


def positions_not_taken(patch):
    """The first rows of RoPE instead of those of the destinations."""
    from comfyui_toma.toma_core.patcher.families import dit

    place = dit if hasattr(dit, "_take") else __import__("importlib").import_module(f"{dit.__package__}.rows")
    name = "_take" if hasattr(place, "_take") else "take"

    def first_rows(value, rows, dim):
        value = value.expand(len(rows), *value.shape[1:])
        return value.narrow(dim, 0, rows.shape[1])

    patch.setattr(place, name, first_rows)


def residual_unmerged_whole(patch):
    """U row(M x) instead of x + U (row(M x) - M x)."""
    from comfyui_toma.toma_core.merge import Merge

    patch.setattr(Merge, "residual", lambda self, x, change: self.unmerge(self.merge(x) + change))


def what_was_picked_does_not_rest(patch):
    from comfyui_toma.toma_core.evaluation import Evaluation

    choose = Evaluation.choose

    def restless(self, place, features, grid):
        before, self.before = self.before, None
        try:
            return choose(self, place, features, grid)
        finally:
            self.before = before

    patch.setattr(Evaluation, "choose", restless)


def merges_are_never_renewed(patch):
    from comfyui_toma.toma_core.patcher.merging import Merging
    from comfyui_toma.toma_core.plan import Action

    turn = Merging._turn

    def lazy(self, last, chunks):
        action, kept = turn(self, last, chunks)
        if last is None or not last.merges:
            return action, kept
        return Action.REUSE, replace(kept, merges=dict(last.merges))

    patch.setattr(Merging, "_turn", lazy)


def check_next_run(models, merged) -> None:
    patched = merged(models["flux"], reselect_every=9)
    fresh = builders.sample(patched, **test_runs.SIZE)
    builders.sample(patched, **{**test_runs.SIZE, "seed": 4})
    assert torch.equal(fresh, builders.sample(patched, **test_runs.SIZE))


def riding(**about):
    return lambda m, g, p: test_by_hand.check_riding_flux(m, g, **about)


def unet(**about):
    return lambda m, g, p: test_by_hand.check_unet(m, g, **about)


def published(models, merged, patch):
    test_by_hand.check_published_flux(models, merged)


FAULTS = [
    (picks_of_one_prompt_for_the_other, lambda m, g, p: test_runs.check_prompts_apart(m, g, p, "flux")),
    (picks_of_one_prompt_for_the_other, lambda m, g, p: test_runs.check_prompts_apart(m, g, p, "sdxl")),
    (chunks_in_the_wrong_order, lambda m, g, p: test_runs.check_prompts_apart(m, g, p, "flux", 2)),
    (picks_of_the_first_image_for_all, riding(batch=2)),
    (picks_of_the_first_image_for_all, lambda m, g, p: test_runs.check_pictures_apart(m, "sdxl")),
    (stale_pick_after_a_change_of_grid, lambda m, g, p: test_runs.check_deep_shrink(m, g)),
    (kept_outlives_the_run, lambda m, g, p: check_next_run(m, g)),
    (history_of_another_run, lambda m, g, p: test_forecasts.check_runs_apart(m, g)),
    (breaks_are_crossed, lambda m, g, p: test_breaks.check_break(m, "conditioning")),
    (phases_are_not_seen, lambda m, g, p: test_breaks.check_break(m, "controlnet")),
    (phases_are_not_seen, lambda m, g, p: test_breaks.check_break(m, "hook keyframe")),
    (history_of_another_size, lambda m, g, p: test_breaks.test_nor_another_size_of_the_latent(m)),
    (answers_of_other_nodes_are_history, lambda m, g, p: test_breaks.test_nor_an_answer_of_another_node(m, "sdxl")),
    (further_passes_are_not_seen, lambda m, g, p: test_breaks.check_further_pass(m)),
    (own_noise_lost, riding()),
    (last_clean_estimate_forgotten, riding()),
    (kept_tokens_without_the_controlnets_part, riding(conds="control")),
    (controlnet_of_the_first_tokens, riding(conds="control")),
    (grade_of_the_wrong_step, lambda m, g, p: test_forecasts.check_grades(m)),
    (graded_after_it_was_taken_in, lambda m, g, p: test_forecasts.check_grades(m)),
    (positions_not_taken, riding()),
    (positions_not_taken, published),
    (residual_unmerged_whole, published),
    (residual_unmerged_whole, unet()),
    (what_was_picked_does_not_rest, riding()),
    (merges_are_never_renewed, unet(every=2)),
    (merges_are_never_renewed, riding()),
]


@pytest.mark.parametrize("fault,check", [pytest.param(f, c, id=f.__name__) for f, c in FAULTS])
def test_the_fault_is_noticed(models, merged, monkeypatch, fault, check):
    check(models, merged, monkeypatch)  # it passes on the code as it is
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, RuntimeError)):
            check(models, merged, monkeypatch)
