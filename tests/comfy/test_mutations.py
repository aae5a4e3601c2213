"""Are the checks able to fail? The code is broken on purpose, one fault at a time, and a check must notice."""

from __future__ import annotations

import pytest
import test_by_hand
import test_detail
import test_runs
import torch


def picks_of_one_prompt_for_the_other(patch):
    from comfyui_toma.toma_core.patcher.run import Run

    keys = Run._keys
    patch.setattr(Run, "_keys", lambda self, x, sigma, options: [k[1:] for k in keys(self, x, sigma, options)])


def picks_of_the_first_picture_for_all(patch):
    from comfyui_toma.toma_core.patcher.call import Call

    choose = Call._choose
    patch.setattr(Call, "_choose", lambda self, place, x, grid: choose(self, place, x[:1].expand_as(x), grid))


def chunks_in_the_wrong_order(patch):
    from comfyui_toma.toma_core.patcher.detail import Kept

    gather = Kept.gather.__func__
    patch.setattr(Kept, "gather", classmethod(lambda cls, parts: gather(cls, parts[::-1])))


def stale_pick_after_a_change_of_grid(patch):
    from comfyui_toma.toma_core.patcher.call import Place

    patch.setattr(Place, "merge_name", lambda self, grid: self.share)


def run_kept_for_the_next(patch):
    """The run's state outlives it."""
    from comfyui_toma.toma_core.patcher.run import Run

    init, kept = Run.__init__, {}

    def shared(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.kept = kept

    patch.setattr(Run, "__init__", shared)
    keys = Run._keys
    patch.setattr(Run, "_keys", lambda self, x, sigma, options: [k[1:] for k in keys(self, x, sigma, options)])
    patch.setattr(Run, "end", _end_without_clearing(Run.end))


def _end_without_clearing(end):
    def kept_on(self, *args):
        kept, self.kept = self.kept, {}
        report = end(self, *args)
        self.kept = kept
        return report

    return kept_on


def rope_rows_not_gathered(patch):
    from comfyui_toma.toma_core.patcher import flux

    patch.setattr(flux, "_take_pe", lambda pe, rows: pe[:, :, : rows.shape[1]])


def residual_lost_by_addition_in_place(patch):
    from comfyui_toma.toma_core.patcher.call import Call

    merged = Call._merged

    def overwritten(self, place, x, tokens, grid, merge, run_block):
        def in_place(given, m):
            out = run_block(given.clone(), m)
            return given.copy_(out) if m is not None else out

        return merged(self, place, x, tokens, grid, merge, in_place)

    patch.setattr(Call, "_merged", overwritten)


def residual_unmerged_whole(patch):
    """U block(M x) instead of x + U (block(M x) - M x)."""
    from comfyui_toma.toma_core.merge import Merge

    patch.setattr(Merge, "residual", lambda self, x, change: self.unmerge(self.merge(x) + change))


def detail_counted_twice(patch):
    """What was expected comes with the change of the kept tokens once more."""
    from comfyui_toma.toma_core.patcher.call import Call

    counted = Call._counted

    def forgetful(self, place, detail, change, expected):
        return counted(self, place, detail, change, None if expected is None else expected * 0)

    patch.setattr(Call, "_counted", forgetful)


def drift_forgotten(patch):
    from comfyui_toma.toma_core.patcher.detail import Detail

    patch.setattr(Detail, "expected", lambda self, at: self.added)


def always_steady(patch):
    from comfyui_toma.toma_core.patcher import detail

    patch.setattr(detail, "steadiness", lambda expected, real: torch.ones_like(real[:, :1, :1]))


def cells_where_there_are_none(patch):
    from comfyui_toma.toma_core.patcher import detail

    patch.setattr(detail, "_as_drift", lambda tokens, tiles, coarse: detail.cells(tokens, tiles))


def control_counted_as_detail(patch):
    from comfyui_toma.toma_core.patcher.call import Call

    init = Call.__init__

    def blind(self, *args, **kwargs):
        init(self, *args, **{**kwargs, "control": False})

    patch.setattr(Call, "__init__", blind)


def all_is_believed(patch):
    from comfyui_toma.toma_core.patcher import detail

    patch.setattr(detail, "believable", lambda seen, real, share: torch.ones_like(real[:, :1]))


def spread_twice(patch):
    """What the first blocks of a span have spread is not taken off at its last."""
    from comfyui_toma.toma_core.patcher.call import Call

    counted = Call._counted

    def careless(self, place, detail, change, expected):
        spread = self.spread.get(place.span, 0.0)
        out = counted(self, place, detail, change, expected)
        return out + spread if place.last else out

    patch.setattr(Call, "_counted", careless)


def learnt_from_one_prompt_only(patch):
    """The prompt that is asked first throws away what the others are to learn from."""
    from comfyui_toma.toma_core.patcher.run import Run

    ask = Run._call

    def selfish(self, keys, step, **about):
        call = ask(self, keys, step, **about)
        self.kept = {key: part for key, part in self.kept.items() if not part[0].outlined}
        return call

    patch.setattr(Run, "_call", selfish)


def check_flux(kind):
    return lambda models, merged, monkeypatch: test_by_hand.check_flux_block(models, kind)


FAULTS = [
    (picks_of_one_prompt_for_the_other, lambda m, g, p: test_runs.check_prompts_apart(m, g, p, "flux")),
    (picks_of_one_prompt_for_the_other, lambda m, g, p: test_runs.check_prompts_apart(m, g, p, "sdxl")),
    (chunks_in_the_wrong_order, lambda m, g, p: test_detail.check_gather("equal")),
    (picks_of_the_first_picture_for_all, check_flux("double")),
    (picks_of_the_first_picture_for_all, lambda m, g, p: test_runs.check_pictures_apart(m, "sdxl")),
    (stale_pick_after_a_change_of_grid, lambda m, g, p: test_runs.check_deep_shrink(m, g)),
    (run_kept_for_the_next, lambda m, g, p: check_next_run(m, g)),
    (rope_rows_not_gathered, check_flux("double")),
    (rope_rows_not_gathered, check_flux("single")),
    (residual_lost_by_addition_in_place, check_flux("double")),
    (residual_lost_by_addition_in_place, lambda m, g, p: test_by_hand.check_unet_block(m)),
    (residual_unmerged_whole, check_flux("single")),
    (residual_unmerged_whole, lambda m, g, p: test_by_hand.check_unet_block(m)),
    (detail_counted_twice, lambda m, g, p: test_detail.check_carry()),
    (drift_forgotten, lambda m, g, p: test_detail.check_carry()),
    (always_steady, lambda m, g, p: test_detail.check_carry()),
    (cells_where_there_are_none, lambda m, g, p: test_detail.check_carry()),
    (control_counted_as_detail, lambda m, g, p: test_detail.check_carry()),
    (all_is_believed, lambda m, g, p: test_detail.check_carry()),
    (spread_twice, lambda m, g, p: test_detail.check_carry()),
    (learnt_from_one_prompt_only, lambda m, g, p: test_runs.check_prompts_apart(m, g, p, "flux")),
]


def check_next_run(models, merged) -> None:
    import builders

    patched = merged(models["flux"], reselect_every=9)
    fresh = builders.sample(patched, **test_runs.SIZE)
    builders.sample(patched, **{**test_runs.SIZE, "seed": 4})
    assert torch.equal(fresh, builders.sample(patched, **test_runs.SIZE))


@pytest.mark.parametrize("fault,check", [pytest.param(f, c, id=f.__name__) for f, c in FAULTS])
def test_the_fault_is_noticed(models, merged, monkeypatch, fault, check):
    check(models, merged, monkeypatch)  # it passes on the code as it is
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, RuntimeError)):
            check(models, merged, monkeypatch)
