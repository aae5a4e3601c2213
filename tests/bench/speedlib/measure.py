"""Measures the groups of a plan, interleaved, and writes every sample down as soon as it is there."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from pathlib import Path

import torch

from . import watch
from .plan import Group

ROUNDS = 3


class Book:
    """The JSON file. An interrupted run is taken up where it stopped: samples that are there are not repeated."""

    def __init__(self, path: Path | None, clock: str) -> None:
        self.path = path
        self.content: dict = {"about": {}, "rows": [], "samples": {}}
        if path and path.is_file():
            self.content = json.loads(path.read_text(encoding="utf-8"))
        self.content["about"] = {**self.content["about"], **machine(), "clock": clock}

    def samples(self, group: str, method: str) -> list:
        return self.content["samples"].setdefault(group, {}).setdefault(method, [])

    def write(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
            part.replace(self.path)


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
    """`until` is when to stop, in seconds of time.monotonic(): no sample is begun that would go beyond it."""

    def __init__(
        self, book: Book, rounds: int = ROUNDS, until: float | None = None, clock: str = "wall"
    ) -> None:
        self.book, self.rounds, self.until, self.clock = book, rounds, until, clock
        self.left_out: list[str] = []
        self.rate = 0.0  # FLOPs a second of wall time, as seen so far
        self.built: tuple | None = None

    def run(self, groups: list[Group], only: list[str], then) -> None:
        """Calls `then` after each sample."""
        for group in groups:
            chosen = [m for m in group.methods if _wanted(group.name, m.key, only)]
            if all(len(self.book.samples(group.name, m.key)) >= self.rounds for m in chosen):
                continue
            self._group(group, chosen, then)
        self._forget()

    def _forget(self) -> None:
        """Two models may not fit into memory at once."""
        import comfy.model_management

        self.built = None
        comfy.model_management.unload_all_models()
        gc.collect()

    def _group(self, group: Group, chosen: list, then) -> None:
        print(f"\n{group.name}", flush=True)
        if self.built is None or self.built[0] is not group.build:
            self._forget()
            self.built = (group.build, group.build())
        model = self.built[1]
        for round_ in range(self.rounds):
            for method in chosen:
                samples = self.book.samples(group.name, method.key)
                if len(samples) > round_ or (samples and "error" in samples[0]):
                    continue
                if not self._time_for(group, method):
                    self.left_out.append(f"{group.name}, {method.key}, round {round_ + 1}")
                    continue
                samples.append(self._sample(group, method, model))
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
        return found

    def _say(self, round_: int, method, found) -> None:
        if isinstance(found, dict):
            print(f"  {round_ + 1}  {method.key:24} fails: {found['error'][:70]}", flush=True)
            return
        each = ", ".join(f"{evaluation['seconds']:.2f}" for evaluation in found)
        print(f"  {round_ + 1}  {method.key:24} {each} s", flush=True)


def _wanted(group: str, method: str, only: list[str]) -> bool:
    """`only` names groups, or groups and methods as "group: method"; beginnings are enough."""
    if not only:
        return True
    pairs = (part.partition(":") for part in only)
    return any(group.startswith(g) and method.startswith(m.strip()) for g, _, m in pairs)
