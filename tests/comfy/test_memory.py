"""Peak memory at real size, on the meta device: the real networks run, their tensors have sizes but no contents."""

from __future__ import annotations

import weakref
from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SDXL = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "context_dim": 2048, "adm_in_channels": 2816,
    "num_classes": "sequential", "use_linear_in_transformer": True, "num_head_channels": 64, "num_heads": -1,
    "use_spatial_transformer": True, "legacy": False,
}  # fmt: skip
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072,
    "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38, "axes_dim": [16, 56, 56],
    "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip


class Peak(TorchDispatchMode):
    """Bytes of all tensors that are alive, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class Real:
    """A real network on the meta device behind our seams, and what a call of it makes."""

    def __init__(self, name: str) -> None:
        import comfy.ops

        make = {"device": "meta", "dtype": torch.bfloat16, "operations": comfy.ops.disable_weight_init}
        if name == "sdxl":
            from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

            self.network = UNetModel(**SDXL, **make)
            self.inputs = {"x": (2, 4, 128, 128), "context": (2, 77, 2048), "y": (2, 2816)}
        else:
            from comfy.ldm.flux.model import Flux

            self.network = Flux(**FLUX, **make)
            self.inputs = {"x": (1, 16, 128, 128), "context": (1, 512, 4096), "y": (1, 768), "guidance": (1,)}
        holder = type("Model", (), {"diffusion_model": self.network, "model_sampling": None})
        self.model = type("Patcher", (), {"model": holder})
        self.weights = sum(p.nbytes for p in self.network.parameters())

    @torch.inference_mode()
    def run(self, family, evaluation) -> Tensor:
        from comfyui_toma.toma_core.patcher.families.base import seams_on

        options = {"toma": evaluation, "original_shape": list(self.inputs["x"])}
        family.install(options)
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in self.inputs.items()}
        times = torch.empty(self.inputs["x"][0], device="meta")
        with seams_on(family, self.network):
            return self.network(tensors.pop("x"), times, transformer_options=options, **tensors)

    def sampled(self, settings, kinds: str) -> Peak:
        """A run of F full, M merged and P forecast steps, its history in fp32 as ComfyUI has its latents."""
        from comfyui_toma.toma_core.chunks import ChunkState
        from comfyui_toma.toma_core.clean import latent_of, tokens_of, unmerged
        from comfyui_toma.toma_core.evaluation import Evaluation
        from comfyui_toma.toma_core.forecast import Forecast
        from comfyui_toma.toma_core.patcher import family_of
        from comfyui_toma.toma_core.plan import Action

        family = family_of(self.model).arrange(settings)
        rides = family.kind == "dit" and settings.rides
        grid = family.grid(self.inputs["x"]) if family.kind == "dit" else (0, 0)
        forecast, last, self.merged = Forecast(), None, 0
        with torch.inference_mode(), Peak() as peak:
            for step, kind in enumerate(kinds):
                if kind == "P":
                    forecast.give(step / len(kinds), 0.1)
                    continue
                action = Action.RESELECT if kind == "M" else Action.NONE
                evaluation = Evaluation(settings, action, ChunkState(1), last, rides, grid=grid)
                if rides and kind == "M":
                    evaluation.merge_for(family.blocks[-1], last.clean, grid)
                out = self.run(family, evaluation)
                if rides and kind == "M":
                    merge = next(iter(evaluation.state.merges.values()))
                    out = latent_of(unmerged(tokens_of(out, family.patch), last.clean, merge), out, family.patch)
                self.merged += any(c.after < c.before for c in evaluation.counted.values())
                last = evaluation.state
                if rides and settings.ratio:
                    last.clean = tokens_of(out, family.patch)
                if settings.tolerance:
                    answer = out.float()
                    forecast.corrected(step / len(kinds), 0.1, answer)
                    forecast.observe(step / len(kinds), answer)
                    del answer
                del out, evaluation
        return peak


PRESETS = ("quality", "balanced", "fast", "turbo", "paper")


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_peak_memory_is_that_of_the_unmerged_run(comfy, name):
    """1024 x 1024 in half precision, with a negative prompt on SDXL: of every preset that of the unmerged run, but for
    five latents, which hold the history of forecasts, clean estimates and the merges that are kept."""
    from comfyui_toma.toma_core import settings as ours

    real = Real(name)
    unmerged = real.sampled(ours.Settings(ratio=0.0), "F")
    latent = 4 * prod(real.inputs["x"])  # bytes, in fp32
    presets = {preset: ours.PRESETS[preset]["unet" if name == "sdxl" else "dit"] for preset in PRESETS}
    # Presets that differ by their tolerance only ask for the same memory in the same kinds of step.
    alike = {(s.ratio, s.merge, s.tolerance > 0): preset for preset, s in presets.items()}
    for preset in alike.values():
        settings = presets[preset]
        peak = real.sampled(settings, "FMM" if not settings.tolerance else "FFPMM" if settings.ratio else "FFPF")
        merged = 2 if settings.ratio else 0
        assert real.merged == merged or preset == "paper", "this shows nothing"
        more = peak.most - unmerged.most
        print(
            f"{name} {preset}: {more / latent:+.1f} latents, {more / (real.weights + unmerged.most):+.2%} of the peak"
        )
        assert more <= 5 * latent, (preset, more)


def test_the_account_sees_what_is_alive():
    with Peak() as peak:
        a = torch.empty(1 << 20, device="meta")
        b = a + 1
        del a
        c = b + 1
    assert peak.most == peak.now == 8 << 20
    del b, c
    assert peak.now == 0
