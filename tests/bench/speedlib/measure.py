"""One sample: a short sampling run through ComfyUI's own sampler, of which the last step is timed from the inside."""

from __future__ import annotations

import time

import builders
import fullsize
import torch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Seconds = dict[str, float]


class Stamps:
    """When which module of a network was entered or left, in the order of the last evaluation.

    Flux: from one block to the next, so that what a method does around its blocks counts with them. UNet: from the
    beginning to the end of a spatial transformer."""

    def __init__(self, network: torch.nn.Module, clock: str) -> None:
        self.now = CLOCKS[clock]
        self.at: list[tuple[str, float]] = []
        self.is_flux = hasattr(network, "double_blocks")
        if self.is_flux:
            entered = [("double", network.double_blocks[0]), ("single", network.single_blocks[0])]
            self.hooks = [module.register_forward_pre_hook(self._stamp(name)) for name, module in entered]
            self.hooks.append(network.final_layer.register_forward_pre_hook(self._stamp("end")))
        else:
            rows = [module for module in network.modules() if type(module).__name__ == "SpatialTransformer"]
            self.hooks = [row.register_forward_pre_hook(self._stamp("row")) for row in rows]
            self.hooks += [row.register_forward_hook(self._stamp("end")) for row in rows]

    def _stamp(self, name: str):
        def hook(*_) -> None:
            self.at.append((name, self.now()))

        return hook

    def parts(self, seconds: float) -> Seconds:
        """Seconds of each part of an evaluation that took so long."""
        found: Seconds = {}
        for (name, start), (_, end) in zip(self.at, self.at[1:]):
            if name != "end":
                found[name] = found.get(name, 0.0) + end - start
        return {**found, "outside": seconds - sum(found.values()), "step": seconds}


def sample(model, size: fullsize.Size, steps: int, clock: str = "wall") -> Seconds:
    """Seconds of the last of `steps`, in parts."""
    from comfy.patcher_extension import WrappersMP

    model = model.clone()
    stamps, found = Stamps(model.model.diffusion_model, clock), {}

    def step(executor, *args, **kwargs):
        stamps.at.clear()
        start = stamps.now()
        out = executor(*args, **kwargs)
        found.update(stamps.parts(stamps.now() - start))
        return out

    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "watch", step)
    prompt = builders.conditioning(model, 1, tokens=fullsize.FLUX_TEXT if stamps.is_flux else fullsize.SDXL_TEXT)
    try:
        with torch.inference_mode():
            builders.sample(model, *size, 1, steps, cfg=1.0, positive=prompt, negative=prompt)
    finally:
        for hook in stamps.hooks:
            hook.remove()
    return found
