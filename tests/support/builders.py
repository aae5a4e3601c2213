"""Tiny models with seeded random weights, in the shape of the real ones. ComfyUI must be imported already."""

import math
from pathlib import Path

import torch

TEXT_TOKENS = 16
SDXL_CONTEXT, SDXL_POOLED = 64, 64
FLUX_CONTEXT, FLUX_POOLED = 64, 32
SD15_CONTEXT = 64


def fill(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Weights that keep activations near 1 and leave nothing zero: each layer has a say in the output."""
    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            filled[name] = noise / math.sqrt(math.prod(shape[1:]))
        elif name.endswith((".weight", ".scale")):
            filled[name] = 1 + 0.1 * noise
        else:
            filled[name] = 0.1 * noise
    return filled


def tiny_flux_file(
    path: Path,
    hidden: int = 256,
    depth: int = 2,
    depth_single: int = 4,
    context: int = FLUX_CONTEXT,
    pooled: int = FLUX_POOLED,
    guidance: bool = True,
    seed: int = 0,
) -> Path:
    """Write a Flux checkpoint that UNETLoader recognises. `hidden` is a multiple of 128, one head each."""
    import comfy.ldm.flux.model
    import comfy.ops
    import safetensors.torch

    model = comfy.ldm.flux.model.Flux(
        in_channels=16, out_channels=16, vec_in_dim=pooled, context_in_dim=context, hidden_size=hidden,
        mlp_ratio=4.0, num_heads=hidden // 128, depth=depth, depth_single_blocks=depth_single,
        axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=guidance,
        txt_ids_dims=[],
        dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    # Published checkpoints say `scale` where newer releases of ComfyUI say `weight`.
    shapes = {
        name.replace("_norm.weight", "_norm.scale"): tuple(weight.shape) for name, weight in model.state_dict().items()
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(fill(shapes, seed), path)
    return path


def tiny_flux(path: Path, **options):
    """The same, loaded through ComfyUI's own UNETLoader: a ModelPatcher. `path` is the file to write."""
    import folder_paths

    import nodes

    path = tiny_flux_file(path, **options)
    # first of all folders: another test may have a file of the same name in its own
    folder_paths.add_model_folder_path("diffusion_models", str(path.parent), is_default=True)
    folder_paths.filename_list_cache.pop("diffusion_models", None)
    model = nodes.UNETLoader().load_unet(path.name, "default")[0]
    model.model.requires_grad_(False)  # 0.16's ask for gradients, and tests sample outside of its inference mode
    return model


def tiny_sdxl(channels: int = 32, deep: int = 3, seed: int = 0):
    """A ModelPatcher around comfy.model_base.SDXL: 2 blocks per transformer at the first resolution with
    attention, `deep` (10 in the real one) at the second, pooled and size embeddings, cross-attention."""
    import comfy.supported_models

    config = {
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 2, 2, deep, deep],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, deep, deep, deep],
        "transformer_depth_middle": deep,
        "use_linear_in_transformer": True,
        "context_dim": SDXL_CONTEXT,
        "num_classes": "sequential",
        "adm_in_channels": SDXL_POOLED + 6 * 256,
    }
    return tiny_unet(comfy.supported_models.SDXL, channels, config, seed)


def tiny_sd15(channels: int = 32, seed: int = 0):
    """A ModelPatcher in the shape of SD 1.5: attention at three resolutions, one block each."""
    import comfy.supported_models

    config = {
        "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "transformer_depth_middle": 1,
        "use_linear_in_transformer": False,
        "context_dim": SD15_CONTEXT,
        "num_classes": None,
        "adm_in_channels": None,
    }
    return tiny_unet(comfy.supported_models.SD15, channels, config, seed)


def tiny_unet(family: type, channels: int, config: dict, seed: int):
    import comfy.model_patcher

    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": channels, "legacy": False,
        "use_spatial_transformer": True, "use_temporal_attention": False, "dtype": torch.float32, **config,
    }  # fmt: skip
    model_config = family(config)
    model_config.unet_config.update(num_heads=-1, num_head_channels=channels)
    model = model_config.get_model({}, device=torch.device("cpu")).requires_grad_(False)
    unet = model.diffusion_model
    unet.load_state_dict(fill({name: tuple(weight.shape) for name, weight in unet.state_dict().items()}, seed))
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def conditioning(model, seed: int = 1, batch: int = 1, tokens: int = TEXT_TOKENS, **extra) -> list:
    """CONDITIONING, as a text encoder of the right width would give it; `extra` joins its dictionary."""
    config = model.model.model_config.unet_config
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(batch, tokens, config.get("context_in_dim") or config["context_dim"], generator=generator)
    pooled_width = config.get("vec_in_dim") or (config.get("adm_in_channels") or 6 * 256) - 6 * 256
    pooled = torch.randn(batch, pooled_width, generator=generator) if pooled_width else None
    return [[text, {"pooled_output": pooled, **extra}]]


def empty_latent(model, width: int = 128, height: int = 128, batch: int = 1) -> torch.Tensor:
    """Zeros [batch, C, height / 8, width / 8] with the model's latent channels."""
    channels = model.get_model_object("latent_format").latent_channels
    return torch.zeros(batch, channels, height // 8, width // 8)


def sample(
    model,
    width: int = 128,
    height: int = 128,
    batch: int = 1,
    steps: int = 4,
    cfg: float | None = None,
    sampler: str = "euler",
    scheduler: str = "simple",
    seed: int = 0,
    denoise: float = 1.0,
    positive: list | None = None,
    negative: list | None = None,
    latent: torch.Tensor | None = None,
    noise_mask: torch.Tensor | None = None,
    callback=None,
) -> torch.Tensor:
    """One run of ComfyUI's own sampling, as KSampler does it. Returns the latent.

    `cfg` is 1 for Flux (no negative pass) and 5 otherwise, unless told.
    """
    import comfy.sample

    is_flux = model.model.model_config.unet_config.get("image_model") == "flux"
    cfg = (1.0 if is_flux else 5.0) if cfg is None else cfg
    latent = empty_latent(model, width, height, batch) if latent is None else latent
    noise = comfy.sample.prepare_noise(latent, seed)
    return comfy.sample.sample(
        model, noise, steps, cfg, sampler, scheduler,
        positive or conditioning(model, 1), negative or conditioning(model, 2),
        latent, denoise=denoise, noise_mask=noise_mask, callback=callback, disable_pbar=True, seed=seed,
    )  # fmt: skip
