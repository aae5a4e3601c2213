"""Peak memory at real size, on the meta device: the real networks run, their tensors have sizes but no contents."""

from __future__ import annotations

import weakref

import pytest
import torch
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
    """A real network on the meta device behind our seams."""

    def __init__(self, name: str, settings) -> None:
        import comfy.model_patcher
        import comfy.ops
        import comfy.utils
        from comfyui_toma.toma_core.patcher import family_of

        make = {"device": "meta", "dtype": torch.bfloat16, "operations": comfy.ops.disable_weight_init}
        if name == "sdxl":
            from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

            self.network = UNetModel(**SDXL, **make)
            self.inputs = {"x": (2, 4, 128, 128), "context": (2, 77, 2048), "y": (2, 2816)}
        else:
            from comfy.ldm.flux.model import Flux

            self.network = Flux(**FLUX, **make)
            self.inputs = {"x": (1, 16, 128, 128), "context": (1, 512, 4096), "y": (1, 768), "guidance": (1,)}
        holder = torch.nn.Module()
        holder.diffusion_model = self.network
        patcher = comfy.model_patcher.ModelPatcher(holder, torch.device("cpu"), torch.device("cpu"))
        self.family = family_of_holder = family_of(type("Model", (), {"model": holder}))(patcher, settings)
        family_of_holder.apply(patcher)
        for path, seam in patcher.object_patches.items():
            comfy.utils.set_attr(holder, path, seam)
        self.weights = sum(p.nbytes for p in self.network.parameters())

    @torch.inference_mode()
    def run(self, call) -> None:
        options = {"toma": call, "original_shape": list(self.inputs["x"])}
        self.family.install(options)
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in self.inputs.items()}
        times = torch.empty(self.inputs["x"][0], device="meta")
        self.network(tensors.pop("x"), times, transformer_options=options, **tensors)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_peak_memory_is_that_of_the_unmerged_run(comfy, name):
    """1024 x 1024 in half precision, with a negative prompt on SDXL: at most 2 % more, weights included."""
    from comfyui_toma.toma_core.patcher.call import Call, Kept
    from comfyui_toma.toma_core.schedule import Action
    from comfyui_toma.toma_core.settings import PRESETS

    presets = [PRESETS[preset]["unet" if name == "sdxl" else "flux"] for preset in ("quality", "fast")]
    real = Real(name, presets[0])
    with Peak() as unmerged:
        real.run(Call(presets[0], Action.LEAVE, Kept(0, 0, 0), latent=(128, 128)))
    for settings in presets:
        real = Real(name, settings)
        kept = Kept(1, 0, 0, coarse=real.family.coarse)
        with Peak() as merged:
            for action, at in ((Action.RESELECT, 0.0), (Action.REUSE, 1.0)):
                real.run(Call(settings, action, kept, at=at, latent=(128, 128)))
            kept = Kept(1, 2, 2, before=kept.outline(), coarse=kept.coarse)
            for action, at in ((Action.RESELECT, 2.0), (Action.REUSE, 3.0)):
                real.run(Call(settings, action, kept, at=at, latent=(128, 128)))
        assert kept.details, "nothing was carried: this test would show nothing"
        learnt = [(detail.added, detail.trust, detail.drift) for detail in kept.details.values()]
        assert all(value is not None for values in learnt for value in values), "nothing was learnt"
        more = (real.weights + merged.most) / (real.weights + unmerged.most) - 1
        print(f"{name} {settings.ratio}: {more:+.2%} of {(real.weights + unmerged.most) / 2**30:.1f} GiB")
        assert more < 0.02
