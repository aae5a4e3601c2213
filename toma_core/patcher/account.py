"""The account of a run: what is counted, noted and told while it goes on."""

from __future__ import annotations

import logging
from threading import Lock
from typing import Protocol

from torch import Tensor

from ..evaluation import Evaluation, Grid
from ..merge import Merge
from ..plan import Kind
from .families.base import Family
from .memory import raise_unless_out_of_memory
from .report import Pick, Report


class Listener(Protocol):
    """Somebody who watches a run. Steps and the end are told on the sampler's thread, picks on the thread that runs the
    model, one at a time; all has to return at once."""

    def __bool__(self) -> bool:
        """Whether anything would be seen now; while it is false nothing is computed for it."""

    def stepped(self, report: Report) -> None:
        """An evaluation begins: the last one of the report."""

    def picked(self, pick: Pick) -> None:
        """Tokens of the prompt were chosen."""

    def ended(self, report: Report) -> None:
        """The run is over, also when it was stopped. Told even while `bool` is false."""


class Account:
    """Writes the report of one run, and tells a listener."""

    def __init__(self, report: Report, family: Family, record: bool, listener: Listener | None) -> None:
        self.report = report
        self.family = family
        self.record = record
        self.listener = listener
        self.merged_blocks: set[tuple[str, int]] = set()
        self.missed_picks = False
        self.explained: set[Kind] = set()
        self.lock = Lock()  # devices that run at a time may have the same to note

    @property
    def step(self) -> int:
        """Of the evaluation that is under way."""
        return self.report.evaluations[-1].step

    def note(self, text: str, *about: Kind) -> None:
        """Something that a user should know of this run: said once in the log, and in the report. `about` are the kinds
        of step that it explains the lack of."""
        with self.lock:
            self.explained.update(about)
            if text in self.report.notes:
                return
            self.report.notes.append(text)
        logging.warning("ToMA: %s", text)

    def picks(self, evaluation: Evaluation, sides: list[int]) -> None:
        """Picks of the prompt itself, not of the negative one; of blocks alike, those of the first."""
        slot = sides.index(0) if 0 in sides else None
        if slot is None or not evaluation.renewed or not (self.record or self.listener):
            return
        step = self.step
        seen = {(pick.step, pick.group) for pick in self.report.picks}
        for block, grid, merge in evaluation.renewed.values():
            group, size = self.family.label(block, grid), len(merge.kept) // len(sides)
            if (step, group) in seen or len(merge.kept) % len(sides):  # another node has split the batch
                continue
            seen.add((step, group))
            try:
                self._note_pick(step, group, grid, merge.images(slot * size, (slot + 1) * size))
            except RuntimeError as error:
                raise_unless_out_of_memory(error)
                if not self.missed_picks:
                    logging.warning("ToMA: no memory to note the picks of step %d: not all are shown", step)
                self.missed_picks = True
                return

    def _note_pick(self, step: int, group: str, grid: Grid, merge: Merge) -> None:
        pick = Pick(step, group, grid, merge.kept, merge.assignment)
        if self.record:
            self.report.picks.append(pick)
        if self.listener:
            self.listener.picked(pick)

    def flops(self) -> tuple[float, float]:
        return self.report.flops_full, self.report.flops_run

    def count(self, evaluation: Evaluation, x: Tensor) -> None:
        report, batch = self.report, x.shape[0]
        other = batch * self.family.other_flops(tuple(x.shape)) if evaluation.counted else 0.0
        report.flops_full += other
        report.flops_run += other
        for where, counted in evaluation.counted.items():
            block = self.family.by_name[where]
            report.flops_full += batch * self.family.block_flops(block, counted, counted.before)
            report.flops_run += batch * self.family.block_flops(block, counted, counted.after)
            if counted.after < counted.before:
                self.merged_blocks.add(where)
                report.tokens[self.family.label(block, counted.grid)] = (counted.before, counted.after)
