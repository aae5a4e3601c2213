"""One sampling run: what it keeps from evaluation to evaluation, and how it ends.

A run lives from the sampler's start to its end, inside the options of that one run, and what it kept goes with it.
`predict_noise` is asked for the guider's answer and decides whether it is forecast; if not, the model runs, and
what happens to its tokens is in merging.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..forecast import Forecast
from ..merge import Select, reselect
from ..plan import SAME, Decision, Kind, Moment, Plan, moment_at
from ..settings import Settings
from .account import Account, Listener
from .breaks import asked_for, phase_of
from .dynamo import as_written, keep_out_of_graphs
from .families.base import Family
from .memory import raise_unless_out_of_memory
from .merging import Merging
from .report import ANSWERED, ErrorMap, Evaluated, Report
from .slots import OthersSlots

UNASKED = "another node runs the model in a way of its own, so that this run was never asked"
SEVERAL = "nothing is forecast: another node asks more than once at each sigma"
FRAME_BY_FRAME = "nothing is forecast: the sampler makes a video part by part, and the model keeps what it has seen"
ADAPTIVE = "nothing is forecast: the sampler chooses its steps by how the answers differ"
READS_MORE = "nothing is forecast: the sampler also reads what the answer is made of, as CFG++ does"
NO_LATENT = "nothing is forecast: the guider's answer is not a latent, another node has changed what it gives"
NOTHING_SET = "nothing is forecast or merged with these settings: ratio and tolerance are 0"
CHANGED = "forecasts start anew: prompts, guidance, size or schedule have changed here"
SHORTEST = 4  # steps: two are computed, one is forecast, the last corrects it
NO_BLOCKS = "no tokens were merged: no block of the model came by, another node runs the model in a way of its own"


class Run:
    """The state of one sampling run."""

    def __init__(
        self,
        settings: Settings,
        family: Family,
        record: bool = False,
        listener: Listener | None = None,
        plan: Plan | None = None,
        select: Select = reselect,
    ) -> None:
        self.settings = settings
        self.family = family
        self.record = record
        self.listener = listener
        self.plan: Plan = plan or settings.plan()
        self.may_forecast = settings.tolerance > 0
        self.forecast = Forecast()
        self.report = Report(family.name, settings, blocks=len(family.blocks), recorded=record)
        self.account = Account(self.report, family, record, listener)
        self.merging = Merging(settings, family, self.account, select)
        self.sigmas: list[float] = []
        self.flow = True
        self.last: tuple[tuple, Moment] | None = None  # what the last evaluation was of (`_changed`), and its moment
        self.grade: Tensor | None = None  # of the last evaluation that ran, still on the device
        self.clock_at = 0.0
        self.images_run = 0  # that went into the network, of all calls which no other node answered
        self.images_each = 0  # of them for the last answer; 0: it is not known
        self.others = OthersSlots()
        self.has_steps = True  # a schedule of one sigma has none
        self.started: float | None = None
        keep_out_of_graphs(Run)

    def __deepcopy__(self, memo: dict) -> Run:
        return self  # packs copy the options of a model deeply, at each step

    # --------------------------------------------------------------------- the guider's answer

    def predict_noise(
        self, executor, x: Tensor, timestep: Tensor, model_options: dict | None = None, seed=None
    ) -> Tensor:
        """Wraps the guider: the clean estimate for x [B, C, ...] at the sigma `timestep` [B], forecast or computed."""
        guider, model_options = executor.class_obj, model_options or {}
        options = model_options.get("transformer_options") or {}
        sigmas = options.get("sample_sigmas")
        if sigmas is None or x.requires_grad:
            why = "asks for gradients (as in training)" if x.requires_grad else "has no schedule"
            self.account.note(f"a latent that {why} is neither forecast nor merged", Kind.FORECAST, Kind.MERGED)
            self._start_anew()
            return executor(x, timestep, model_options, seed)
        self._begin(guider, sigmas)
        sigma = self._read(timestep)
        moment = moment_at(sigma, self.sigmas, self.flow)
        if self._reads_more(guider, model_options):
            self.forecast_nothing(READS_MORE)
        if "ar_state" in options:
            self.forecast_nothing(FRAME_BY_FRAME)
        if self._asked_again(sigma):
            self.forecast_nothing(SEVERAL)
        changed = self._changed(guider, x, sigma, moment, options)
        if changed:
            self._start_anew()
        decision = self.plan.next(moment, self.forecast.places)
        if changed and self.may_forecast:
            decision = Decision(decision.kind, CHANGED)
        given = None
        if decision.kind is Kind.FORECAST:
            given = self._with_memory(self.forecast.give, moment.place, moment.weight)
            decision = decision if given is not None else Decision(Kind.FULL, "forecasting ran out of memory")
        entry = Evaluated(moment.step, sigma, decision.kind.value, decision.why)
        self.report.evaluations.append(entry)
        if self.listener:
            self.listener.stepped(self.report)
        if given is not None:
            entry.work = 0.0
            return given
        return self._compute(executor, (x, timestep, model_options, seed), decision, moment, entry)

    def _compute(self, executor, arguments: tuple, decision: Decision, moment: Moment, entry: Evaluated) -> Tensor:
        """The model's own answer. It grades the forecast that would have stood in its place."""
        self.merging.begin(decision.kind)
        self.report.latent = tuple(arguments[0].shape[2:])
        images, again, before = self.images_run, self.merging.run_again, self.account.flops()
        try:
            with as_written(self.family.compiles):
                answer = executor(*arguments)
        finally:
            self.merging.begin(None)
        full, run = (now - then for now, then in zip(self.account.flops(), before))
        entry.work = run / full if full else 1.0
        if decision.kind is Kind.MERGED and not self.merging.merged:
            entry.kind = Kind.FULL.value
            if not self.may_forecast:  # else it is told why it was not forecast
                entry.why = "no tokens were merged here"
        # by what lies between the guider and the network, or in the place of its blocks
        answered = (images and self.images_run == images) or self.others.skipped()
        latent = isinstance(answer, Tensor) and answer.shape == arguments[0].shape
        if answered or not latent:
            entry.why = ANSWERED if latent else "the answer is not a latent"
            if not latent and self.may_forecast:
                self.account.note(NO_LATENT, Kind.FORECAST)
            self._start_anew()
            return answer
        if not self.may_forecast:
            return answer
        images_before, self.images_each = self.images_each, self.images_run - images
        if self.merging.run_again > again:  # some went in twice
            self.images_each = 0
        elif images_before not in (0, self.images_each):  # a further pass of another node (SLG, PAG) has begun or ended
            self._start_anew()
        if self.record and self.forecast.anchors:
            self._map_error(answer, moment)
        corrected = self._with_memory(self._observe, answer, moment)
        return answer if corrected is None else corrected

    def forecast_nothing(self, why: str) -> None:
        """This run can't be forecast: what its settings merge is merged by the schedule."""
        if self.may_forecast:
            self.account.note(why, Kind.FORECAST)
            self.may_forecast, self.plan = False, self.settings.schedule
            self._start_anew()

    def _start_anew(self) -> None:
        """No forecast goes across here."""
        self.forecast.forget()
        self.plan.restart()
        self.grade = None

    def _with_memory(self, work: Callable[..., Tensor], *args) -> Tensor | None:
        """work(*args) of the forecast; None if there is no memory for it, and then the history starts anew."""
        try:
            return work(*args)
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
        self.account.note("not all was forecast: forecasting ran out of memory", Kind.FORECAST)
        self._start_anew()
        return None

    def _observe(self, answer: Tensor, moment: Moment) -> Tensor:
        """Takes the answer into the history; what the sampler gets is corrected by the errors of earlier forecasts."""
        corrected = self.forecast.corrected(moment.place, moment.weight, answer)
        self.grade = self.forecast.observe(moment.place, answer)
        return corrected

    def _map_error(self, answer: Tensor, moment: Moment) -> None:
        """Where the forecast in the place of this answer was wrong. A map that finds no memory is left out."""
        try:
            error = (self.forecast.at(moment.place) - answer).abs().mean(1) / answer.abs().mean().clamp_min(1e-20)
        except RuntimeError as problem:
            raise_unless_out_of_memory(problem)
            return
        self.report.error_maps.append(ErrorMap(moment.step, error.unsqueeze(1) if error.ndim == 3 else error))

    def _begin(self, guider, sigmas: Tensor) -> None:
        if self.sigmas:
            return
        self.started = time.perf_counter()
        self.sigmas = sigmas.tolist()
        self.report.steps = max(1, len(self.sigmas) - 1)
        self.flow = _is_flow(guider) and max(self.sigmas) <= 1.0
        if self.family.why_unmerged and self.settings.ratio:
            self.account.note(f"tokens are not merged: {self.family.why_unmerged}", Kind.MERGED)
        elif self.family.blocks and all(block.skipped for block in self.family.blocks):
            skip = "skip_first_blocks" + (" (-1: as published)" if self.settings.skip_first_blocks < 0 else "")
            count = len(self.family.blocks)
            self.account.note(f"tokens are not merged: {skip} leaves none of the {count} blocks", Kind.MERGED)

    def _read(self, timestep: Tensor) -> float:
        """This evaluation's sigma, and the grade of the last one that ran: the one time in a step that the host waits
        for the device, so the time between two of them is that of an evaluation."""
        sigma = timestep.flatten()[0]
        grade, self.grade = self.grade, None
        read = sigma.float()[None]
        now, *learnt = (read if grade is None else torch.cat((read, grade.to(read.device)))).tolist()
        self._clock()
        if learnt:
            last = next(e for e in reversed(self.report.evaluations) if e.kind != Kind.FORECAST.value)
            last.error, last.off = learnt[0], self.plan.learn(*learnt)
        return now

    def _clock(self) -> None:
        now = time.perf_counter()
        if self.report.evaluations:
            self.report.evaluations[-1].seconds = now - self.clock_at
        self.clock_at = now

    def _asked_again(self, sigma: float) -> bool:
        """Whether the second evaluation is at the first one's sigma. No sampler of one latent does this, unless its
        schedule says so."""
        asked = self.report.evaluations
        return len(asked) == 1 and sigma == asked[0].sigma and self.sigmas.count(sigma) < 2

    def _changed(self, guider, x: Tensor, sigma: float, moment: Moment, options: dict) -> bool:
        """Whether this evaluation does not continue the last one. It is the last one from here on."""
        cfg = getattr(guider, "cfg", None)  # CFGOverride sets another one for a part of the schedule
        about = (tuple(x.shape), x.dtype, phase_of(getattr(guider, "conds", None), sigma), asked_for(options), cfg)
        last, self.last = self.last, (about, moment)
        if last is None:
            return False
        backwards = moment.place < last[1].place - SAME
        return about != last[0] or backwards or moment.step > last[1].step + 1

    @staticmethod
    def _reads_more(guider, model_options: dict) -> bool:
        """Whether the sampler has asked to see more than the guider's answer. A forecast has no more than that."""
        name = "sampler_post_cfg_function"
        return len(model_options.get(name, ())) > len(getattr(guider, "model_options", {}).get(name, ()))

    def network(self, executor, *args, **kwargs):
        """Wraps the network's forward, inside of what other nodes wrap it with: counts what none of them answered."""
        out = executor(*args, **kwargs)
        with self.account.lock:
            self.images_run += len(args[0]) if args else 1
        return out

    def end(self, finished: bool, attention: str) -> Report:
        """Drops all that was kept and gives the account of the run."""
        self.merging.end()
        self.forecast.forget()
        if finished:  # else the last evaluation was broken off, and its time is none of a whole one
            self._clock()
        report = self.report
        report.seconds = time.perf_counter() - self.started if self.started else 0.0
        if finished:
            self._tell_why_nothing()
        report.blocks_merged = len(self.account.merged_blocks)
        report.attention = attention
        report.finished = finished
        try:
            report.picks = [pick.cpu() for pick in report.picks]
            for shown in report.error_maps:
                shown.error = shown.error.cpu()
        except RuntimeError:
            if finished:
                raise
            report.picks, report.error_maps = [], []  # the device has failed, and that error is on its way to the user
        if self.listener is not None:
            self.listener.ended(report)
        return report

    def _tell_why_nothing(self) -> None:
        """Of a run in which nothing was forecast or merged, the reason, unless it is told already."""
        report, settings, explained = self.report, self.settings, self.account.explained
        usual = Kind.FORECAST if settings.tolerance else Kind.MERGED
        if not settings.tolerance and not settings.ratio:
            report.notes.append(NOTHING_SET)  # no warning: it is how a plain run is timed
        elif not report.evaluations:
            if self.has_steps and not explained:
                self.account.note(f"nothing was forecast or merged: {UNASKED}")
        elif self.family.blocks and settings.ratio and not report.flops_full:
            if Kind.MERGED not in explained:
                self.account.note(NO_BLOCKS)
        elif set(report.kinds) == {Kind.FULL.value} and usual not in explained:
            steps = "1 step is" if report.steps == 1 else f"{report.steps} steps are"
            reason = f"{steps} too few" if report.steps < SHORTEST else report.usual_reason
            self.account.note(f"nothing was forecast or merged: {reason}")


def _is_flow(guider) -> bool:
    """Whether sigma is the share of noise in a mixture with the image, as in flow matching, from 0 to 1."""
    from comfy.model_sampling import CONST

    return isinstance(guider.model_patcher.get_model_object("model_sampling"), CONST)
