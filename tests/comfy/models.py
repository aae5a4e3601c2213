"""The models of the integration tests: tiny, with random weights, through ComfyUI's own classes."""

from __future__ import annotations

import builders
import torch


def tiny_flux2(seed: int = 0):
    """Flux.2: one modulation for all blocks, patches of 1, another feed-forward."""
    import comfy.supported_models

    config = {
        "image_model": "flux2", "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 64,
        "hidden_size": 128, "mlp_ratio": 3.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 3,
        "axes_dim": [32, 32, 32, 32], "theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": False,
        "txt_ids_dims": [3], "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
        "default_ref_method": "index", "ref_index_scale": 10.0,
    }  # fmt: skip
    return _filled(comfy.supported_models.Flux2, config, seed)


def tiny_chroma(seed: int = 0):
    """Chroma: modulation from a distilled guidance layer."""
    import comfy.supported_models

    config = {
        "image_model": "chroma", "in_channels": 64, "out_channels": 64, "context_in_dim": 64, "hidden_size": 128,
        "mlp_ratio": 4.0, "num_heads": 1, "depth": 19, "depth_single_blocks": 38, "axes_dim": [16, 56, 56],
        "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 128, "hidden_dim": 64,
        "n_layers": 2, "txt_ids_dims": [], "vec_in_dim": None,
    }  # fmt: skip
    return _filled(comfy.supported_models.Chroma, config, seed)


def _filled(kind: type, config: dict, seed: int):
    import comfy.model_patcher

    model_config = kind({**config, "dtype": torch.float32})
    model = model_config.get_model({}, device=torch.device("cpu"))
    network = model.diffusion_model
    shapes = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    network.load_state_dict(builders.fill(shapes, seed))
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def control_sdxl(model, seed: int = 5):
    """A ControlNet for the tiny SDXL, ComfyUI's own class."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops

    config = dict(model.model.model_config.unet_config)
    config = {k: v for k, v in config.items() if k not in ("out_channels", "transformer_depth_output", "image_size")}
    config.update(hint_channels=3, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    network = comfy.cldm.cldm.ControlNet(image_size=32, **config)
    return _control(network, seed)


def control_flux(model, seed: int = 5):
    """A ControlNet for the tiny Flux, ComfyUI's own class, in the manner of XLabs."""
    import comfy.ldm.flux.controlnet
    import comfy.ops

    config = dict(model.model.model_config.unet_config)
    config = {k: v for k, v in config.items() if k not in ("image_model", "dtype")}
    config.update(depth=2, depth_single_blocks=1)
    network = comfy.ldm.flux.controlnet.ControlNetFlux(
        dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init, **config
    )
    return _control(network, seed, extra_conds=["y", "guidance"])


def _control(network, seed: int, **options):
    import comfy.controlnet

    network.load_state_dict(builders.fill({n: tuple(w.shape) for n, w in network.state_dict().items()}, seed))
    return comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"), **options)


def with_control(conditioning: list, control, width: int, height: int, strength: float = 0.5) -> list:
    """Conditioning as the node Apply ControlNet makes it."""
    import nodes

    hint = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(7))
    return nodes.ControlNetApply().apply_controlnet(conditioning, control, hint, strength)[0]


def lora_for(model, seed: int = 9, rank: int = 2, strength: float = 0.7):
    """The model with a LoRA on every linear layer of its transformer blocks, through ComfyUI's loader."""
    import comfy.sd

    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for name, weight in model.model.state_dict().items():
        if weight.ndim == 2 and name.endswith(".weight") and ("blocks" in name):
            key = name.removesuffix(".weight")
            lora[f"{key}.lora_A.weight"] = (
                torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            )
            lora[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) / rank**0.5 * 0.3
    return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]
