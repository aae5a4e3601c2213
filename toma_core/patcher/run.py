"""One sampling run: what it keeps from evaluation to evaluation, and how it ends.

A run lives from the sampler's start to its end, inside the options of that one run, and what it kept goes with it.
`predict_noise` is asked for the guider's answer and decides whether it is forecast; if not, the model runs, and
`apply_model` meets each batch on its way into the network.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from threading import Lock

import torch
from torch import Tensor, nn

from ..chunks import Kept
from ..clean import latent_of, tokens_of, unmerged
from ..evaluation import Evaluation, Unmergeable
from ..forecast import Forecast
from ..merge import Select, reselect
from ..plan import Action, Decision, Kind, Moment, Plan, moment_at
from ..settings import Settings
from .account import Account, Listener
from .breaks import asked_for, phase_of
from .dynamo import as_a_call_of_its_own, keep_out_of_graphs, room_for_graphs
from .families.base import KEY, Family, seams_on
from .families.dit import DiTFamily
from .memory import ours, raise_unless_out_of_memory
from .report import ErrorMap, Evaluated, Report

UNASKED = "another node runs the model in a way of its own, so that this run was never asked"
SEVERAL = "nothing is forecast: another node asks more than once at each sigma"
NO_LATENT = "nothing is forecast: the guider's answer is not a latent, another node has changed what it gives"
NOT_TOLD = "another node runs the blocks without their transformer_options, or does not run them"
NO_BLOCKS = "no tokens were merged: no block of the model came by, another node runs the model in a way of its own"


class Run:
    """The state of one sampling run. The chunks of a batch (cond, uncond, ...) are kept apart by key."""

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
        self.select = select
        self.plan: Plan = plan or settings.plan()
        self.forecast = Forecast()
        self.report = Report(family.name, settings, blocks=len(family.places))
        self.account = Account(self.report, family, record, listener)
        self.sigmas: list[float] = []
        self.flow = True
        self.seen: tuple | None = None  # shape, phase and step of the last evaluation
        self.several = False  # whether several latents are sampled at a time
        self.decision: Decision | None = None  # of the evaluation that is under way
        self.merged = False  # whether it has merged anything
        self.grade: Tensor | None = None  # of the last evaluation that ran, still on the device
        self.since = 0.0
        self.kept: dict[Hashable, tuple[Kept, int]] = {}
        self.passes: dict[Hashable, int] = {}
        self.merged_steps: set[int] = set()
        self.networks: dict[int, ExitStack] = {}  # whose forwards are wrapped
        self.inner_calls = 0  # of the network, which no other node answered
        self.started: float | None = None
        self.lock = Lock()  # several devices evaluate chunks of one batch at a time, each on a thread of its own
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
            why = "the latent asks for gradients, as in training" if x.requires_grad else "there is no schedule"
            self.account.note(f"nothing is forecast or merged: {why}")
            return executor(x, timestep, model_options, seed)
        self._begin(guider, sigmas)
        sigma = self._read(timestep)
        moment = moment_at(sigma, self.sigmas, self.flow)
        if self._breaks(guider, x, sigma, moment, options):
            self.forecast.forget()
            self.plan.restart()
        decision = self.plan.next(moment, self.forecast.places)
        entry = Evaluated(moment.step, sigma, decision.kind.value, decision.why)
        self.report.evaluations.append(entry)
        if self.listener:
            self.listener.stepped(self.report)
        if decision.kind is Kind.FORECAST:
            entry.work = 0.0
            return self.forecast.give(moment.place, moment.weight)
        return self._compute(executor, (x, timestep, model_options, seed), decision, moment, entry)

    def _compute(self, executor, arguments: tuple, decision: Decision, moment: Moment, entry: Evaluated) -> Tensor:
        """The model's own answer. It grades the forecast that would have stood in its place."""
        self.decision, self.passes, self.merged = decision, {}, False
        self.report.latent = tuple(arguments[0].shape[2:])
        inner, before = self.inner_calls, self.account.flops()
        try:
            answer = executor(*arguments)
        finally:
            self.decision = None
        full, run = (now - then for now, then in zip(self.account.flops(), before))
        entry.work = run / full if full else 1.0
        if decision.kind is Kind.MERGED and not self.merged:
            entry.kind, entry.why = Kind.FULL.value, "no tokens were merged here"
        answered = inner and self.inner_calls == inner  # by what lies between the guider and the network
        latent = isinstance(answer, Tensor) and answer.shape == arguments[0].shape
        if answered or not latent:
            entry.why = "another node answered in the place of the model" if latent else "the answer is not a latent"
            if not latent and self.settings.tolerance:
                self.account.note(NO_LATENT)
            self.forecast.forget()
            self.plan.restart()
            return answer
        return self._observe(answer, moment) if self.settings.tolerance else answer

    def _observe(self, answer: Tensor, moment: Moment) -> Tensor:
        """Takes the answer into the history; what the sampler gets is corrected by the errors of earlier forecasts."""
        if self.record and self.forecast.anchors:
            error = (self.forecast.at(moment.place) - answer).abs().mean(1) / answer.abs().mean().clamp_min(1e-20)
            self.report.error_maps.append(ErrorMap(moment.step, error.unsqueeze(1) if error.ndim == 3 else error))
        corrected = self.forecast.corrected(moment.place, moment.weight, answer)
        self.grade = self.forecast.observe(moment.place, answer)
        return corrected

    def _begin(self, guider, sigmas: Tensor) -> None:
        if self.sigmas:
            return
        self.started = time.perf_counter()
        self.sigmas = sigmas.tolist()
        self.report.steps = max(1, len(self.sigmas) - 1)
        self.flow = _is_flow(guider) and max(self.sigmas) <= 1.0
        if self.family.why_unmerged and self.settings.ratio:
            self.account.note(f"tokens are not merged: {self.family.why_unmerged}")
        elif self.family.places and all(place.skipped for place in self.family.places):
            self.account.note(
                f"tokens are not merged: skip_first_blocks leaves none of the {len(self.family.places)} blocks"
            )

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
            self.report.evaluations[-1].seconds = now - self.since
        self.since = now

    def _breaks(self, guider, x: Tensor, sigma: float, moment: Moment, options: dict) -> bool:
        """Whether the history must not be continued here."""
        phase = (phase_of(getattr(guider, "conds", None), sigma), asked_for(options))
        about, self.seen = self.seen, (tuple(x.shape), x.dtype, phase, (moment, sigma))
        if about is None:
            return False
        before, last_sigma = about[-1]
        if len(self.report.evaluations) == 1 and sigma == last_sigma:  # no sampler of one latent does this
            self.several = True
            self.account.note(SEVERAL)
        backwards = moment.place < before.place - 1e-6
        return self.several or about[:-1] != self.seen[:-1] or backwards or moment.step > before.step + 1

    # --------------------------------------------------------------------- a batch into the network

    def apply_model(
        self,
        executor,
        x,
        t,
        c_concat=None,
        c_crossattn=None,
        control=None,
        transformer_options=None,
        **inputs,
    ):
        """Wraps BaseModel.apply_model: says what the blocks do with their tokens, runs the model, keeps what was
        renewed. What can't go on merged is run again in full."""
        if self.decision is None:  # not for an answer of the guider: in training, or by a node of its own
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **inputs)
        options = dict(transformer_options or {})
        network = executor.class_obj.diffusion_model
        with self.lock:
            self._wrap(getattr(network, "_orig_mod", network))
            keys = self._keys(x, options)
        evaluation = self._evaluation(x, keys, options, inputs, merges=self._runs_as_written(network))
        inputs = as_a_call_of_its_own(network, inputs)
        try:
            out = self._network(evaluation, executor, x, t, c_concat, c_crossattn, control, options, inputs)
        except Unmergeable as stop:
            self.account.note(f"left unmerged because {stop}")
            out = None
        if out is None:  # outside of `except`, which would hold on to memory
            evaluation = self._evaluation(x, keys, options, inputs, merges=False)
            out = self._network(evaluation, executor, x, t, c_concat, c_crossattn, control, options, inputs)
        with self.lock:
            self.merged = self.merged or evaluation.rode
            self._keep(evaluation, keys, out)
            self.account.picks(evaluation, options.get("cond_or_uncond") or [0])
            self.account.count(evaluation, x)
        return out

    def _network(self, evaluation: Evaluation, executor, x, t, c_concat, c_crossattn, control, options, inputs):
        options = {**options, KEY: evaluation}
        family, rides = self.family, evaluation.copies and evaluation.merges
        if rides and isinstance(family, DiTFamily):
            options, control = ours(family.shorter_inputs, evaluation, options, control)
        with room_for_graphs(self.family.compiles):
            out = executor(x, t, c_concat, c_crossattn, control, options, **inputs)
        if rides and evaluation.rode:
            out = ours(self._unmerged, evaluation, out)
        elif rides and (control is not None or "double_block" in options.get("patches", {})):
            raise Unmergeable(NOT_TOLD)  # what was made shorter for the kept tokens has met all of them
        elif rides:
            self.account.note(f"left unmerged because {NOT_TOLD}")
        return out

    def _runs_as_written(self, network: nn.Module) -> bool:
        """Whether ComfyUI's own code runs the blocks, as far as that matters."""
        asked = self.settings.rides and self.decision is not None and self.decision.kind is Kind.MERGED
        if not asked or not isinstance(self.family, DiTFamily):
            return True
        foreign = self.family.runs_blocks(getattr(network, "_orig_mod", network))
        if foreign:
            self.account.note(f"tokens are not merged: another node runs the blocks by code of its own ({foreign})")
        return not foreign

    def _unmerged(self, evaluation: Evaluation, out: Tensor) -> Tensor:
        """The clean estimates [B, C, ...] of all tokens, of those of the kept ones."""
        assert isinstance(self.family, DiTFamily) and evaluation.last is not None and evaluation.last.clean is not None
        merge, patch = next(iter(evaluation.kept.merges.values())), self.family.patch
        clean = unmerged(tokens_of(out, patch), evaluation.last.clean, merge)
        return latent_of(clean, out, patch)

    def network(self, executor, *args, **kwargs):
        """Wraps the network's forward, inside of what other nodes wrap it with: counts what none of them answered."""
        self.inner_calls += 1
        return executor(*args, **kwargs)

    def _wrap(self, network: nn.Module) -> None:
        if id(network) not in self.networks:
            self.networks[id(network)] = seams_on(self.family, network)

    def _keys(self, x: Tensor, options: dict) -> list[Hashable]:
        """One key a chunk of the batch. Guidance nodes (PAG, SLG) evaluate a prompt a second time in one answer, with
        blocks changed: that pass is told from the first, so that neither takes what belongs to the other."""
        uuids, frames = options.get("uuids") or [None], _frames(options)
        keys: list[Hashable] = []
        for uuid in uuids:
            chunk = (uuid, x.shape[0] // len(uuids), *x.shape[1:], x.dtype, x.device, frames)
            self.passes[chunk] = self.passes.get(chunk, -1) + 1
            keys.append((*chunk, self.passes[chunk]))
        return keys

    def _evaluation(
        self, x: Tensor, keys: Sequence[Hashable], options: dict, inputs: dict, merges: bool = True
    ) -> Evaluation:
        """What the plan says, except that a chunk which missed its turn (its prompt starts later) takes it now."""
        family, rides = self.family, isinstance(self.family, DiTFamily) and self.settings.rides
        grid = family.grid(tuple(x.shape)) if isinstance(family, DiTFamily) else (0, 0)
        leave = Evaluation(self.settings, Action.LEAVE, Kept(len(keys)), copies=rides, grid=grid, inputs=inputs)
        if not merges or self.decision is None or self.decision.kind is not Kind.MERGED or family.why_unmerged:
            return leave
        why = family.why_not(x, options, inputs)
        if why:
            self.account.note(f"tokens are not merged: {why}")
            return leave
        parts = [part for part in map(self.kept.get, keys) if part is not None]
        try:
            last = Kept.gather(parts) if len(parts) == len(keys) else None
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            last = None
        if rides and (last is None or last.clean is None):
            return leave  # the first evaluation of a chunk: there is no clean estimate yet
        action, kept = self._turn(last, len(keys))
        evaluation = Evaluation(self.settings, action, kept, last, rides, self.select, grid, inputs)
        return self._chosen(evaluation) or leave if rides else evaluation

    def _turn(self, last: Kept | None, chunks: int) -> tuple[Action, Kept]:
        """What is to be renewed, counted in merged steps, and what the call starts with."""
        now = len(self.merged_steps - {self.report.evaluations[-1].step})
        selected = now - now % self.settings.reselect_every
        weighed = now - (now - selected) % self.settings.reweight_every
        if last is None or not last.merges or last.selected_at < selected:
            return Action.RESELECT, Kept(chunks, now, now)
        if last.weighed_at < weighed:
            return Action.REWEIGHT, Kept(chunks, last.selected_at, now, dict(last.merges))
        return Action.REUSE, Kept(chunks, last.selected_at, last.weighed_at, dict(last.merges))

    def _chosen(self, evaluation: Evaluation) -> Evaluation | None:
        """Kept tokens that ride through the whole network are chosen before it, by the last clean estimate."""
        assert evaluation.last is not None
        try:
            ours(evaluation.merge_for, self.family.places[-1], evaluation.last.clean, evaluation.grid)
        except Unmergeable as stop:
            self.account.note(f"left unmerged because {stop}")
            return None
        return evaluation

    def _keep(self, evaluation: Evaluation, keys: Sequence[Hashable], out: Tensor) -> None:
        if evaluation.merges:
            self.merged_steps.add(self.report.evaluations[-1].step)
        elif not (evaluation.copies and self.settings.ratio):
            return
        kept = evaluation.kept
        if evaluation.copies and isinstance(self.family, DiTFamily):
            try:
                kept.clean = tokens_of(out.detach(), self.family.patch)
            except RuntimeError as error:
                raise_unless_out_of_memory(error)
        now = len(self.report.evaluations)
        kept.used_at = now
        self.kept.update({key: (kept, slot) for slot, key in enumerate(keys)})
        # Windows that slide on, and are never seen again, must not pile up.
        horizon = now - 2 * max(2, self.settings.reselect_every)
        self.kept = {key: part for key, part in self.kept.items() if part[0].used_at >= horizon}

    def _means_to(self) -> bool:
        return self.settings.tolerance > 0 or self.settings.ratio > 0

    def end(self, finished: bool, attention: str) -> Report:
        """Drops all that was kept and gives the account of the run."""
        for seams in self.networks.values():
            seams.close()
        self.forecast.forget()
        self.kept.clear()
        self.passes.clear()
        self._clock()
        report = self.report
        report.seconds = time.perf_counter() - self.started if self.started else 0.0
        if finished and not report.evaluations:
            self.account.note(f"nothing was forecast or merged: {UNASKED}")
        elif finished and self.family.places and self.settings.ratio and not report.flops_full:
            if not any("merged" in note for note in report.notes):
                self.account.note(NO_BLOCKS)
        elif finished and not report.notes and set(report.kinds) == {Kind.FULL.value} and self._means_to():
            why = Counter(evaluated.why for evaluated in report.evaluations).most_common(1)[0][0]
            self.account.note(f"nothing was forecast or merged: {why}")
        report.blocks_merged = len(self.account.merged_blocks)
        report.attention = attention
        report.finished = finished
        report.picks = [pick.cpu() for pick in report.picks]
        for shown in report.error_maps:
            shown.error = shown.error.cpu()
        if self.listener is not None:
            self.listener.ended(report)
        return report


def _is_flow(guider) -> bool:
    """Whether sigma is the share of noise in a mixture with the image, as in flow matching, from 0 to 1."""
    from comfy.model_sampling import CONST

    return isinstance(guider.model_patcher.get_model_object("model_sampling"), CONST)


def _frames(options: dict) -> tuple | None:
    """What a sliding window shows of a longer latent: ComfyUI's own, or AnimateDiff-Evolved's."""
    window = options.get("context_window")
    shown = window.index_list if window is not None else (options.get("ad_params") or {}).get("sub_idxs")
    return tuple(shown) if shown is not None else None
