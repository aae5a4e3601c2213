"""What a run did, for the log, the page and other nodes: counted, not taken from the settings."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from statistics import median
from uuid import UUID

from torch import Tensor

from ..evaluation import Grid
from ..plan import OFF, UNKNOWN, Kind
from ..settings import Settings

VERSION = 1  # of `Report.as_json`
ANSWERED = "another node answered in the place of the model"


@dataclass
class Evaluated:
    """One evaluation of the guider: what it was and why. `error` is how far off the forecast in its place was, relative
    to the answer, and `off` what it would have cost the image, weight * error, in times of what the tolerance allowed
    there: both only of one that ran. `work` is its share of the FLOPs of a full one."""

    step: int
    sigma: float
    kind: str
    why: str
    error: float | None = None
    off: float | None = None
    work: float = 1.0
    seconds: float = 0.0


@dataclass
class Pick:
    """Which tokens of one group of blocks stayed at one step, for each of the B images of the prompt."""

    step: int
    group: str
    grid: Grid
    kept: Tensor  # [B, K] the kept tokens
    assignment: Tensor  # [B, N] for each token, which of the K it went to

    def cpu(self) -> Pick:
        return Pick(self.step, self.group, self.grid, self.kept.cpu(), self.assignment.cpu())


@dataclass
class ErrorMap:
    """Where the forecast was wrong at a step that ran: mean absolute difference of the channels, relative to the mean
    absolute answer, [B, T, H, W] of the latent."""

    step: int
    error: Tensor


@dataclass
class Report:
    family: str
    settings: Settings
    blocks: int
    steps: int = 0
    evaluations: list[Evaluated] = field(default_factory=list)
    latent: tuple[int, ...] = (0, 0)
    blocks_merged: int = 0
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    attention: str = ""
    seconds: float = 0.0
    flops_full: float = 0.0
    flops_run: float = 0.0
    finished: bool = False
    recorded: bool = False  # whether picks and error maps were to be kept
    sampled: UUID | None = None  # the weights' patches of the sampled MODEL: branches with other LoRAs share a ToMA
    picks: list[Pick] = field(default_factory=list)
    error_maps: list[ErrorMap] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """The kind of each evaluation, in their order."""
        return [evaluated.kind for evaluated in self.evaluations]

    @property
    def counts(self) -> dict[str, int]:
        """How many evaluations were of each kind."""
        count = Counter(self.kinds)
        return {kind.value: count[kind.value] for kind in Kind}

    @property
    def usual_reason(self) -> str:
        """Why most evaluations were what they were; before all others a reason that another tolerance would change, and
        last that of the first steps. Those that differ by a number only are one, told as given last."""
        all_of_them = [evaluated.why for evaluated in self.evaluations]
        later = [why for why in all_of_them if why != UNKNOWN]
        whys = [why for why in later if OFF in why] or later or all_of_them
        last = {re.sub(r"\d\S*", "", why): why for why in whys}
        count = Counter(re.sub(r"\d\S*", "", why) for why in whys)
        return last[count.most_common(1)[0][0]]

    @property
    def seconds_per_step(self) -> float:
        steps = self.steps if self.finished else len({evaluated.step for evaluated in self.evaluations})
        return self.seconds / max(1, steps)

    @property
    def work_speedup(self) -> float:
        """How many times less was computed than by as many full evaluations."""
        done = sum(evaluated.work for evaluated in self.evaluations)
        return len(self.evaluations) / done if done else 1.0

    @property
    def measured_speedup(self) -> float | None:
        """The same by the clock: all evaluations at the median time of a full one, over the time that they took. None
        where fewer than two full ones were timed, or all were full; the first of a run does not count, it warms up."""
        if set(self.kinds) == {Kind.FULL.value}:
            return None
        timed = [e for e in self.evaluations[1:] if e.seconds]
        full = [e.seconds for e in timed if e.kind == Kind.FULL.value and e.why != ANSWERED]
        return median(full) * len(timed) / sum(e.seconds for e in timed) if len(full) > 1 else None

    def summary(self) -> str:
        """20 steps: 9 full, 2 merged, 9 forecast: 1.9x by work done, 1.8x measured"""
        count = len(self.evaluations)
        what = f"{self.steps} steps" if count == self.steps else f"{self.steps} steps, {count} evaluations"
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.counts.items() if number) or "none run"
        line = f"{what}: {kinds}: {self.work_speedup:.2g}x by work done"
        measured = self.measured_speedup
        return line if measured is None else f"{line}, {measured:.2g}x measured"

    def sentence(self) -> str:
        """The run in one line."""
        line = f"ToMA: {self.family}, {self.summary()}, {self.seconds_per_step:.3g} s/step"
        if self.tokens:
            tokens = ", ".join(f"{name} {n} -> {k}" for name, (n, k) in self.tokens.items())
            line += f"; tokens {tokens} in {self.blocks_merged} of {self.blocks} blocks"
        line += f"; {self.attention}"
        if not self.finished:
            line += "; ended early"
        return line + "".join(f"; {note}" for note in self.notes)

    def as_json(self) -> dict:
        """The statistics as data; docs/statistics.md says what each field means."""
        settings = {**asdict(self.settings), "merge": self.settings.merge.value}
        return {
            "version": VERSION,
            "model": self.family,
            "settings": settings,
            "steps": self.steps,
            "finished": self.finished,
            "counts": self.counts,
            "evaluations": [_rounded(asdict(evaluated)) for evaluated in self.evaluations],
            "speedup": {"work": _round(self.work_speedup), "measured": _round(self.measured_speedup)},
            "seconds": _round(self.seconds),
            "seconds_per_step": _round(self.seconds_per_step),
            "blocks": {"merged": self.blocks_merged, "all": self.blocks},
            "tokens": {name: list(counts) for name, counts in self.tokens.items()},
            "attention": self.attention,
            "notes": self.notes,
            "summary": self.summary(),
        }


def _round(value: float | None) -> float | None:
    """Four significant digits; JSON knows neither infinity nor what is no number."""
    return float(f"{value:.4g}") if value is not None and abs(value) < 1e30 else None


def _rounded(entry: dict) -> dict:
    return {name: _round(value) if isinstance(value, float) else value for name, value in entry.items()}


class Handle:
    """What a patched MODEL carries for other nodes: its settings and the reports of its last runs. Packs that copy the
    options of a model deeply still hold the same one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reports: deque[Report] = deque(maxlen=4)

    def __deepcopy__(self, memo: dict) -> Handle:
        return self
