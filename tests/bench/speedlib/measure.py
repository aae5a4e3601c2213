"""Measures the groups of a plan, interleaved, and writes every sample down as soon as it is there."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections import Counter
from pathlib import Path

import torch

from . import watch
from .plan import Group

ROUNDS = 3


class Book:
    """The JSON file. An interrupted run is taken up where it stopped: samples that are there are not repeated.

    What was measured in another way is not mixed with it, and what failed for want of memory is tried again."""

    def __init__(self, path: Path | None, clock: str, quick: bool = False) -> None:
        self.path = path
        self.content: dict = {"about": {}, "rows": [], "samples": {}}
        now = {**machine(), "clock": clock, "quick": quick}
        if path and path.exists():
            self.content = read(path)
            for name in ("torch", "threads", "cpu", "clock", "quick") if self.content["samples"] else ():
                before = self.content["about"].get(name, False)
                if before != now[name]:
                    raise SystemExit(
                        f"{path} holds samples with {name} {before}, now it is {now[name]}: name another file."
                    )
        self.content["about"] = {**self.content["about"], **now}
        for of_group in self.content["samples"].values():
            for method in [m for m, samples in of_group.items() if samples and _short_of_memory(samples[0])]:
                del of_group[method]

    def samples(self, group: str, method: str) -> list:
        return self.content["samples"].setdefault(group, {}).setdefault(method, [])

    def write(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
            part.replace(self.path)


def read(path: Path) -> dict:
    """A file of this benchmark, or the end with one sentence."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict) or not {"about", "rows", "samples"} <= set(content):
        raise SystemExit(f"{path} is no file of `python dev.py bench speed`.")
    return content


def _short_of_memory(sample: list | dict) -> bool:
    return "error" in sample and "memory" in sample["error"]


def machine() -> dict:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _processor(),
        "load": [round(value, 1) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "written": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


class Measuring:
    """`until` is when to stop, in seconds of time.monotonic(): no sample is begun that would go beyond it.

    Small models are all kept (`at_once`), and a round goes through all groups: when time runs out, there is
    something of each. Otherwise there is one model at a time, and a round goes through one group."""

    def __init__(
        self,
        book: Book,
        rounds: int = ROUNDS,
        until: float | None = None,
        clock: str = "wall",
        at_once: bool = False,
    ) -> None:
        self.book, self.rounds, self.until, self.clock, self.at_once = book, rounds, until, clock, at_once
        self.left_out: Counter = Counter()
        self.session = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        self.rate = 0.0  # FLOPs a second of wall time, as seen so far
        self.built: dict = {}

    def run(self, groups: list[Group], only: list[str], then) -> None:
        """Calls `then` after each sample."""
        rounds = range(self.rounds)
        if self.at_once:
            turns = [(group, [round_]) for round_ in rounds for group in groups]
        else:
            turns = [(group, rounds) for group in groups]
        for group, these in turns:
            chosen = [m for m in group.methods if _wanted(group.name, m.key, only)]
            open_ = [(r, m) for r in these for m in chosen if self._is_open(group, m, r)]
            if open_:
                print(f"\n{group.name}", flush=True)
                self._group(group, _beside_none(group, open_), then)
        self._forget()

    def _is_open(self, group: Group, method, round_: int) -> bool:
        samples = self.book.samples(group.name, method.key)
        return len(samples) <= round_ and not (samples and "error" in samples[0])

    def _forget(self) -> None:
        """Two models may not fit into memory at once."""
        import comfy.model_management

        self.built.clear()
        comfy.model_management.unload_all_models()
        gc.collect()

    def _group(self, group: Group, turns: list, then) -> None:
        if group.build not in self.built:
            if not self.at_once:
                self._forget()
            self.built[group.build] = group.build()
        for round_, method in turns:
            if any("error" in sample for sample in self.book.samples(group.name, method.key)):
                continue
            if not self._time_for(group, method):
                self.left_out[group.name] += 1
                continue
            samples = self.book.samples(group.name, method.key)
            samples.append(self._sample(group, method, self.built[group.build]))
            self._say(round_, method, samples[-1])
            then()

    def _time_for(self, group: Group, method) -> bool:
        if self.until is None or not self.rate:
            return True
        return time.monotonic() + group.flops(method) / self.rate < self.until

    def _sample(self, group: Group, method, model):
        flops, start = group.flops(method), time.monotonic()
        try:
            found = watch.sample(method.make(model), group.latent_size, group.batch, method.steps, self.clock)
        except Exception as error:  # a rival that fails is a result
            first = str(error).splitlines()[0] if str(error) else ""
            return {"error": f"{type(error).__name__}: {first}"}
        self.rate = flops / (time.monotonic() - start)
        return [{**evaluation, "session": self.session} for evaluation in found]

    def _say(self, round_: int, method, found) -> None:
        if isinstance(found, dict):
            print(f"  {round_ + 1}  {method.key:24} fails: {found['error'][:70]}", flush=True)
            return
        each = ", ".join(f"{evaluation['seconds']:.2f}" for evaluation in found)
        print(f"  {round_ + 1}  {method.key:24} {each} s", flush=True)


def _beside_none(group: Group, turns: list) -> list:
    """The turns, each round with a run without any node: a speed-up is a ratio of what was measured together."""
    none = next(method for method in group.methods if method.name == "none")
    rounds = dict.fromkeys(round_ for round_, _ in turns)
    return [
        turn
        for round_ in rounds
        for turn in [(round_, none), *((r, m) for r, m in turns if r == round_ and m is not none)]
    ]


def matching(groups: list[Group], only: list[str]) -> list[Group]:
    return [group for group in groups if any(_wanted(group.name, m.key, only) for m in group.methods)]


def _wanted(group: str, method: str, only: list[str]) -> bool:
    """`only` names groups, or groups and methods as "group: method"; beginnings are enough."""
    if not only:
        return True
    pairs = (part.partition(":") for part in only)
    return any(group.startswith(g) and method.startswith(m.strip()) for g, _, m in pairs)
