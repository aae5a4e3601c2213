"""One sample: a sampling run of a few steps through ComfyUI's own sampler, timed from the inside.

Timed are each evaluation of the model, each of its transformer blocks (with what a method does around it), and
what ToMA does itself. A timer costs a microsecond, so all of them are always on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import builders
import fullsize
import torch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
OURS = ("select", "weigh", "merge", "unmerge", "copies")


class Stopwatch:
    """Seconds by name; of a region inside another, the outer one does not count the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.running: list[list] = []  # [name, since]

    @contextmanager
    def region(self, name: str):
        now = self.clock()
        if self.running:
            outer = self.running[-1]
            self.seconds[outer[0]] += now - outer[1]
        self.running.append([name, now])
        try:
            yield
        finally:
            now = self.clock()
            name, since = self.running.pop()
            self.seconds[name] += now - since
            if self.running:
                self.running[-1][1] = now

    def timed(self, name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            with self.region(name):
                return function(*args, **kwargs)

        return call


@contextmanager
def replaced(holder, name: str, make: Callable[[Callable], Callable]):
    original = getattr(holder, name)
    setattr(holder, name, make(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


@contextmanager
def ours_timed(watch: Stopwatch):
    """While active, ToMA's own work is booked under OURS; "inner" is the model's own block inside it."""
    from comfyui_toma.toma_core import merge
    from comfyui_toma.toma_core.patcher import call, flux, unet

    def block(original):
        def timed(self, place, x, grid, run_block):
            inner = run_block if place.span in ("double", "single") else watch.timed("inner", run_block)
            with watch.region("copies"):
                return original(self, place, x, grid, inner)

        return timed

    regions = [
        (merge, "similarity", "select"), (merge, "select", "select"), (merge, "weigh", "weigh"),
        (call, "weigh", "weigh"), (merge.Merge, "merge", "merge"), (merge.Merge, "take", "merge"),
        (merge.Merge, "unmerge", "unmerge"), (merge.Merge, "residual", "unmerge"),
        (flux, "_run", "inner"), (flux.FluxFamily, "_block", "copies"),
        (unet.BlockSeam, "_layers", "inner"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for holder, name, region in regions:
            stack.enter_context(replaced(holder, name, lambda f, region=region: _method(watch, region, f)))
        stack.enter_context(replaced(call.Call, "block", block))
        yield


def _method(watch: Stopwatch, region: str, function: Callable) -> Callable:
    """A plain function, so that it binds when it stands for a method."""

    def timed(*args, **kwargs):
        with watch.region(region):
            return function(*args, **kwargs)

    return timed


class Blocks:
    """Seconds of each transformer block of a network by its kind, with all that a method does around it."""

    def __init__(self, network: torch.nn.Module, watch: Stopwatch) -> None:
        self.network, self.watch, self.clock = network, watch, watch.clock
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.ours: dict[str, dict[str, float]] = {}
        self.is_flux = hasattr(network, "double_blocks")

    @contextmanager
    def watched(self):
        """A UNet's blocks are timed by hooks on the modules: patches replace their forward, not their call."""
        handles = []
        if not self.is_flux:
            for module in self.network.modules():
                kind = type(module).__name__
                if kind == "BasicTransformerBlock":
                    handles += self._hooks(module, f"block {module.norm1.weight.shape[0]}")
                elif kind == "ResBlock":
                    handles += self._hooks(module, "res block")
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, module: torch.nn.Module, kind: str) -> list:
        started = []

        def before(*_) -> None:
            started.append(self.clock())

        def after(*_) -> None:
            self._book(kind, started.pop())

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def wrapper(self, executor, *args, **kwargs):
        """Flux's blocks are timed around their slots: there a method works outside of the module."""
        if not self.is_flux:
            return executor(*args, **kwargs)
        args = [self._slots_timed(arg) if isinstance(arg, dict) else arg for arg in args]
        return executor(*args, **kwargs)

    def _slots_timed(self, options: dict) -> dict:
        replace = options.get("patches_replace", {})
        slots = dict(replace.get("dit", {}))
        kinds = (("double", self.network.double_blocks), ("single", self.network.single_blocks))
        for kind, blocks in kinds:
            for i in range(len(blocks)):
                slot = (f"{kind}_block", i)
                slots[slot] = partial(self._slot, f"{kind} block", slots.get(slot))
        return {**options, "patches_replace": {**replace, "dit": slots}}

    def _slot(self, kind: str, inner: Callable | None, args: dict, extra: dict) -> dict:
        start = self.clock()
        out = inner(args, extra) if inner else extra["original_block"](args)
        self._book(kind, start)
        return out

    def _book(self, kind: str, start: float) -> None:
        self.seconds[kind].append(self.clock() - start)
        mine = self.ours.setdefault(kind, dict.fromkeys(OURS, 0.0))
        for name in OURS:
            mine[name] += self.watch.seconds.pop(name, 0.0)

    def taken(self) -> dict:
        """What was booked since the last time."""
        booked = {"blocks": dict(self.seconds), "ours": self.ours}
        self.seconds, self.ours = defaultdict(list), {}
        return booked


def sample(model, size: fullsize.Size, batch: int, steps: int, clock: str = "wall") -> list[dict]:
    """One run of `steps` evaluations, each as {seconds, blocks, ours, check, memory}: what JSON can hold."""
    from comfy.patcher_extension import WrappersMP

    model = model.clone()
    watch, evaluations = Stopwatch(CLOCKS[clock]), []
    blocks = Blocks(model.model.diffusion_model, watch)

    def step(executor, *args, **kwargs):
        blocks.taken()
        held = reset_peak()
        start = watch.clock()
        out = executor(*args, **kwargs)
        seconds = watch.clock() - start
        memory = None if held is None else max(0, peak() - held)
        check = float(out.double().abs().sum())
        evaluations.append({"seconds": seconds, **blocks.taken(), "check": check, "memory": memory})
        return out

    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "watch", step)
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", blocks.wrapper)
    tokens = fullsize.FLUX_TEXT if blocks.is_flux else fullsize.SDXL_TEXT
    prompt = builders.conditioning(model, 1, tokens=tokens)
    with torch.inference_mode(), ours_timed(watch), blocks.watched():
        builders.sample(model, *size, batch, steps, cfg=1.0, positive=prompt, negative=prompt)
    return evaluations


def reset_peak() -> int | None:
    """Bytes of memory this process holds, from which the peak is counted on; None where Linux is not there."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")
