"""One sampling run: what it keeps from call to call, what it counts, and how it ends.

A run lives from the sampler's start to its end, inside the options of that one run. Nothing of it is
written on the model, and what it kept goes with it.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..merge import Merge
from ..schedule import Action, place_of, step_of
from ..settings import Settings
from .call import OUT_OF_MEMORY, Call, Grid, Place
from .compiled import as_a_call_of_its_own, room_for_graphs
from .detail import Detail, Kept
from .memory import raise_unless_out_of_memory

KEY = "toma"
# Told of each pick of the prompt as it is made, on the sampler's thread: has to return at once.
Listener = Callable[["Pick"], None]
_WORDS = {
    Action.RESELECT: "reselected",
    Action.REWEIGHT: "reweighted",
    Action.REUSE: "reused",
    Action.LEAVE: "left alone",
}


def network_of(model):
    """The network of a ModelPatcher. Nodes that compile it as a whole leave theirs on the loaded model, where
    the next patcher finds it: it holds the network that was there before. None if there is no network."""
    network = getattr(getattr(model, "model", None), "diffusion_model", None)
    return getattr(network, "_orig_mod", network)


def _frames(options: dict) -> tuple | None:
    """What a sliding window shows of a longer latent: ComfyUI's own, or AnimateDiff-Evolved's."""
    window = options.get("context_window")
    shown = window.index_list if window is not None else (options.get("ad_params") or {}).get("sub_idxs")
    return tuple(shown) if shown is not None else None


def _in_training(x: Tensor) -> str | None:
    """Training nodes sample with gradients, at each step another picture: there is nothing to carry on."""
    return "the latent asks for gradients, as in training" if x.requires_grad else None


def _outlined(parts: Sequence[tuple[Kept, int]]) -> list[tuple[Kept, int]]:
    """The same chunks of outlines; those of one batch have one outline."""
    outlines = {id(kept): kept if kept.outlined else kept.outline() for kept, _ in parts}
    return [(outlines[id(kept)], slot) for kept, slot in parts]


class Family(ABC):
    """What a run has to know of a model's architecture."""

    name: str
    description: str
    places: list[Place]
    compiles: bool = True  # whether torch.compile may have the blocks
    coarse: bool = False  # whether the drift of what blocks add is remembered of cells of tokens, not of each

    @cached_property
    def by_name(self) -> dict[tuple[str, int], Place]:
        """The places by span and index."""
        return {(place.span, place.index): place for place in self.places}

    @staticmethod
    @abstractmethod
    def matches(network) -> bool:
        """Whether a model's network is of this family."""

    def apply(self, model) -> None:
        """Puts on a patcher (a clone) what has to be there before a run, if anything."""

    def forget(self, model) -> None:
        """Takes that off a patcher that was copied for another device."""

    @abstractmethod
    def install(self, options: dict) -> None:
        """Put the seams into the transformer_options of one run."""

    @abstractmethod
    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        """Why this call (latent x [B, C, H, W]) can't be merged, or None."""

    @abstractmethod
    def label(self, place: Place, grid: Grid) -> str:
        """The group under which a block's tokens are reported."""

    @abstractmethod
    def block_flops(
        self, place: Place, before: int, after: int, channels: int, text: int, beside: int
    ) -> float:
        """FLOPs of one block for one picture whose `before` tokens are merged to `after`, with `text` tokens
        and `beside` others that are never merged."""


@dataclass
class Pick:
    """Which tokens of one group of blocks stayed at one step, for each of the B pictures of the prompt."""

    step: int
    group: str
    grid: Grid
    kept: Tensor  # [B, K] the kept tokens
    assignment: Tensor  # [B, N] for each token, which of the K it went to

    def cpu(self) -> Pick:
        return Pick(self.step, self.group, self.grid, self.kept.cpu(), self.assignment.cpu())


@dataclass
class Report:
    """What a run did, for the log and for other nodes: counted, not taken from the settings."""

    family: str
    settings: Settings
    blocks: int
    steps: int = 0
    at_step: dict[int, str] = field(default_factory=dict)  # only of steps that were run
    latent: Grid = (0, 0)
    blocks_merged: int = 0
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    unmerged_because: list[str] = field(default_factory=list)
    attention: str = ""
    seconds: float = 0.0
    calls: int = 0
    flops_full: float = 0.0
    flops_run: float = 0.0
    finished: bool = False
    picks: list[Pick] = field(default_factory=list)

    @property
    def actions(self) -> list[str]:
        """What the steps did that were run, in their order."""
        return [self.at_step[step] for step in sorted(self.at_step)]

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / max(1, self.steps if self.finished else len(self.at_step))

    @property
    def flops_saved(self) -> float:
        """Share of the transformer blocks' FLOPs that was not computed."""
        return 1.0 - self.flops_run / self.flops_full if self.flops_full else 0.0

    def sentence(self) -> str:
        """The run in one line."""
        count = Counter(self.actions)
        steps = ", ".join(f"{count[a.name]} {word}" for a, word in _WORDS.items() if count[a.name])
        if self.finished and self.actions and len(self.actions) < self.steps:
            steps += f", {self.steps - len(self.actions)} skipped by another node"
        tokens = ", ".join(f"{name} {n} -> {k}" for name, (n, k) in self.tokens.items()) or "not merged"
        line = (
            f"ToMA: {self.family}, {self.blocks_merged} of {self.blocks} blocks merged, tokens {tokens}; "
            f"{self.steps} steps ({steps or 'none run'}), {self.seconds_per_step:.3g} s a step, "
            f"{self.flops_saved:.0%} of the blocks' FLOPs saved, {self.attention}"
        )
        if not self.finished:
            line += "; ended early"
        return line + "".join(f"; left unmerged because {reason}" for reason in self.unmerged_because)


class Handle:
    """What a patched MODEL carries for other nodes: its settings and the reports of its last runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reports: deque[Report] = deque(maxlen=4)


class Run:
    """The state of one sampling run. The chunks of a batch (cond, uncond, ...) are kept apart by key."""

    def __init__(
        self, settings: Settings, family: Family, record: bool = False, listener: Listener | None = None
    ) -> None:
        self.settings = settings
        self.family = family
        self.record = record
        self.listener = listener
        self.report = Report(family.name, settings, blocks=len(family.places))
        self.table: list[Action] = []
        self.sigmas: list[float] = []
        self.kept: dict[Hashable, tuple[Kept, int]] = {}
        self.passes: dict[Hashable, tuple[float, int]] = {}
        self.merged_blocks: set[tuple[str, int]] = set()
        self.started: float | None = None
        self.missed_picks = False

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
        """Wraps BaseModel.apply_model: prepares the call, runs the model, keeps what was renewed."""
        self.started = self.started or time.perf_counter()
        options = dict(transformer_options or {})
        about = {"latent": tuple(x.shape[-2:]), "control": control is not None}
        outside, step, keys = self._begin(options), 0, []
        if not outside:
            # The one place where the host waits for the device: which step this is has to be known here.
            sigma = float(options["sigmas"].flatten()[0])
            step = step_of(sigma, self.sigmas)
            about["at"] = place_of(sigma, step, self.sigmas)
        why_not = outside or _in_training(x) or self.family.why_not(x, options, inputs)
        if why_not:
            self.because(why_not)
            call = Call(self.settings, Action.LEAVE, Kept(0, 0, 0), step, **about)
        else:
            keys = self._keys(x, sigma, options)
            call = self._call(keys, step, record=self.record or bool(self.listener), **about)
        options[KEY] = call
        inputs = as_a_call_of_its_own(executor.class_obj.diffusion_model, inputs)
        with room_for_graphs(self.family.compiles):
            out = executor(x, t, c_concat, c_crossattn, control, options, **inputs)
        if not call.tokens and call.action is not Action.LEAVE:
            return out  # a cache has answered in the place of the blocks
        self._keep(call, keys)
        self._note_picks(call, options.get("cond_or_uncond") or [0])
        self._count(call, x.shape[0], c_crossattn.shape[1] if c_crossattn is not None else 0)
        return out

    def _begin(self, options: dict) -> str | None:
        if options.get("sample_sigmas") is None or options.get("sigmas") is None:
            return "the model was called outside of a sampler's schedule"
        if not self.table:
            self.sigmas = options["sample_sigmas"].tolist()
            self.table = self.settings.schedule.table(max(1, len(self.sigmas) - 1))
            self.report.steps = len(self.table)
            if all(place.skipped for place in self.family.places):
                self.because(
                    f"skip_first_blocks leaves none of the model's {len(self.family.places)} blocks to merge"
                )
            if self.settings.carries and set(self.table) <= {Action.LEAVE, Action.RESELECT}:
                self.because(
                    f"of {len(self.table)} step(s) none is left to merge after the one that chooses tokens"
                )
        return None

    def _keys(self, x: Tensor, sigma: float, options: dict) -> list[Hashable]:
        """One key a chunk of the batch.

        Guidance nodes (PAG, SLG) evaluate a prompt a second time at one sigma, with blocks changed: that
        pass is told from the first, so that neither takes what belongs to the other.
        """
        uuids, frames = options.get("uuids") or [None], _frames(options)
        keys = []
        for uuid in uuids:
            chunk = (uuid, x.shape[0] // len(uuids), *x.shape[1:], x.dtype, x.device, frames)
            last_sigma, passes = self.passes.get(chunk, (None, 0))
            passes = passes + 1 if last_sigma == sigma else 0
            self.passes[chunk] = (sigma, passes)
            keys.append((*chunk, passes))
        return keys

    def _call(self, keys: Sequence[Hashable], step: int, **about) -> Call:
        """What the schedule says, except that a chunk which missed its turn (its prompt starts later) takes
        it now. Steps that a cache skips don't count: else most of those it leaves would be the unmerged ones."""
        leave = Call(self.settings, Action.LEAVE, Kept(0, 0, 0), step, **about)
        if self.table[step] is Action.LEAVE or self.settings.ratio == 0:
            return leave
        ran = list(self.report.at_step)  # a copy: with several devices there are other threads
        now = max(self.table.index(Action.RESELECT), sum(before < step for before in ran))
        turns = [s for s in range(now + 1) if self.table[s] in (Action.RESELECT, Action.REWEIGHT)]
        chosen_at = [s for s in turns if self.table[s] is Action.RESELECT]
        self._drop_before(chosen_at)
        parts = [part for part in map(self.kept.get, keys) if part is not None]
        known = len(parts) == len(keys)
        late = any(kept.outlined or kept.selected_at < chosen_at[-1] for kept, _ in parts)
        try:
            # Not all of them are outlines, if one missed its turn.
            kept = Kept.gather(_outlined(parts) if late else parts) if known else None
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            leave.reasons.append(OUT_OF_MEMORY)
            return leave
        if late or not known:
            fresh = Kept(len(keys), now, now, before=kept, coarse=self.family.coarse)
            return Call(self.settings, Action.RESELECT, fresh, step, **about)
        if kept.weighed_at < turns[-1]:
            merges = {name: Detail(detail.merge) for name, detail in kept.details.items()}
            renewed = Kept(kept.chunks, kept.selected_at, now, merges)
            return Call(self.settings, Action.REWEIGHT, renewed, step, **about)
        return Call(self.settings, Action.REUSE, kept, step, **about)

    def _drop_before(self, turns: Sequence[int]) -> None:
        """What no call can use any more goes before the step that needs the most memory, not after it: at each of the
        turns to choose all that the one before had kept, but for its outline (which has what was added, to be
        compared), and the outline with the next. Windows that slide on, and are never seen again, don't pile up so."""
        for key, (kept, _) in list(self.kept.items()):
            if kept.selected_at < (turns[-2:][0] if self.settings.carries else turns[-1]):
                self.kept.pop(key, None)
        late = {key: part for key, part in list(self.kept.items()) if part[0].selected_at < turns[-1]}
        try:
            outlines = _outlined(list(late.values()))
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            outlines = [None] * len(late)
        for (key, part), outline in zip(late.items(), outlines, strict=True):
            if self.kept.get(key) is part:
                self.kept.pop(key) if outline is None else self.kept.update({key: outline})

    def _keep(self, call: Call, keys: Sequence[Hashable]) -> None:
        if call.action is not Action.LEAVE:
            call.kept.before = None
            self.kept.update({key: (call.kept, slot) for slot, key in enumerate(keys)})
        for reason in call.reasons:
            self.because(reason)

    def _note_picks(self, call: Call, sides: list[int]) -> None:
        """Picks of the prompt itself, not of the negative one; of blocks alike, those of the first."""
        slot = sides.index(0) if 0 in sides else None
        if slot is None or not call.chosen:
            return
        seen = {(pick.step, pick.group) for pick in self.report.picks}
        for place, grid, merge in call.chosen.values():
            group, size = self.family.label(place, grid), len(merge.kept) // len(sides)
            if (call.step, group) in seen or len(merge.kept) % len(sides):  # another node has split the batch
                continue
            seen.add((call.step, group))
            try:
                self._note_pick(call.step, group, grid, merge.images(slot * size, (slot + 1) * size))
            except RuntimeError as error:
                raise_unless_out_of_memory(error)
                if not self.missed_picks:
                    logging.warning(
                        "ToMA: no memory to note the picks of step %d: not all are shown", call.step
                    )
                self.missed_picks = True
                return

    def _note_pick(self, step: int, group: str, grid: Grid, merge: Merge) -> None:
        pick = Pick(step, group, grid, merge.kept, merge.assignment)
        if self.record:
            self.report.picks.append(pick)
        if self.listener:
            self.listener(pick)

    def because(self, reason: str) -> None:
        """Something was left unmerged: said once in the log, and in the report."""
        if reason not in self.report.unmerged_because:
            self.report.unmerged_because.append(reason)
            logging.warning("ToMA: not merged here because %s", reason)

    def _count(self, call: Call, batch: int, text: int) -> None:
        report = self.report
        report.calls += 1
        report.at_step.setdefault(call.step, call.action.name)
        report.latent = call.latent
        for where, (grid, before, after, beside, channels) in call.tokens.items():
            place = self.family.by_name[where]
            others = channels, text, beside
            report.flops_full += batch * self.family.block_flops(place, before, before, *others)
            report.flops_run += batch * self.family.block_flops(place, before, after, *others)
            if after < before:
                self.merged_blocks.add(where)
                report.tokens[self.family.label(place, grid)] = (before, after)

    def end(self, finished: bool, attention: str) -> Report:
        """Drops all that was kept and gives the account of the run."""
        report = self.report
        report.seconds = time.perf_counter() - self.started if self.started else 0.0
        if finished and self.started and not report.flops_full:
            self.because("no block of the model came by: another node runs the model in a way of its own")
        report.blocks_merged = len(self.merged_blocks)
        report.attention = attention
        report.finished = finished
        report.picks = [pick.cpu() for pick in report.picks]
        self.kept.clear()
        self.passes.clear()
        return report
