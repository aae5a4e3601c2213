"""Every model that ComfyUI samples, tiny: a table with one entry a model, and how an entry is built and sampled.

    case = CASES["wan21_t2v"]
    model = build("wan21_t2v")              # a ModelPatcher around ComfyUI's own classes, built once
    latent = sample(case, model, steps=3)

Weights are random, seeded, and nowhere zero. The entries lie in tiny_image.py, tiny_video.py, tiny_unet.py and
tiny_other.py; what cannot be sampled is in NOT_SAMPLED, with the reason. ComfyUI must be imported already.
"""

from __future__ import annotations

import atexit
import os
import re
from functools import cache
from pathlib import Path

import builders
import tiny_image
import tiny_other
import tiny_unet
import tiny_video
import torch
from tiny_entry import Given, Tiny

TABLES = (tiny_image, tiny_video, tiny_unet, tiny_other)
CASES: dict[str, Tiny] = {case.name: case for table in TABLES for case in table.CASES}
NOT_SAMPLED: dict[str, str] = tiny_other.NOT_SAMPLED  # class -> why it has no entry


def latent_shape(case: Tiny, rows: int | None = None, columns: int | None = None, frames: int | None = None,
                 batch: int = 1) -> tuple:  # fmt: skip
    """Shape of the latent with batch; rows, columns and frames count latent cells. Nested: a tuple of shapes."""
    batch *= case.batch
    if isinstance(case.shape[0], tuple):
        return tuple((batch, *part) for part in case.shape)
    shape = list(case.shape)
    if rows or columns:
        shape[-2:] = rows or shape[-2], columns or shape[-1]
    if frames:
        shape[1] = frames
    return (batch, *shape)


def empty_latent(case: Tiny, **size):
    shapes = latent_shape(case, **size)
    return _nested([torch.zeros(shape) for shape in (shapes if isinstance(shapes[0], tuple) else [shapes])])


def given_frame(case: Tiny, **size) -> tuple:
    """Latent and noise mask of image to video: the first frame is given, all else is to be drawn."""
    shapes = latent_shape(case, **size)
    latents = [torch.zeros(shape) for shape in (shapes if isinstance(shapes[0], tuple) else [shapes])]
    masks = [torch.ones(len(part), 1, *part.shape[2:]) for part in latents]
    latents[0][:, :, :1] = torch.randn(latents[0][:, :, :1].shape, generator=torch.Generator().manual_seed(3))
    masks[0][:, :, :1] = 0
    return _nested(latents), _nested(masks)


def _nested(parts: list[torch.Tensor]):
    import comfy.nested_tensor

    return parts[0] if len(parts) == 1 else comfy.nested_tensor.NestedTensor(parts)


def conditioning(case: Tiny, seed: int = 1, batch: int = 1, **size) -> list:
    """CONDITIONING, as the nodes of this model would give it."""
    given = Given(case, latent_shape(case, batch=batch, **size), torch.Generator().manual_seed(seed))
    text = None if case.text is None else given.noise(batch, case.tokens, case.text)
    pooled = given.noise(batch, case.pooled) if case.pooled else None
    return [[text, {"pooled_output": pooled, **(case.extra(given) if case.extra else {})}]]


def sample(case: Tiny, model, rows: int | None = None, columns: int | None = None, frames: int | None = None,
           batch: int = 1, **options):  # fmt: skip
    """One run of ComfyUI's own sampling, in inference mode as its executor does it: the final latent.

    Sizes count latent cells. Other options are those of builders.sample.
    """
    size = {"rows": rows, "columns": columns, "frames": frames, "batch": batch}
    latent, mask = given_frame(case, **size) if case.frame_kept else (empty_latent(case, **size), None)
    defaults = {
        "latent": latent, "noise_mask": mask, "steps": 3, "cfg": case.cfg,
        "positive": conditioning(case, 1, **size), "negative": conditioning(case, 2, **size),
    }  # fmt: skip
    with torch.inference_mode():
        return builders.sample(model, **{**defaults, **options})


@cache
def build(name: str):
    """The model of an entry, a ModelPatcher. Shared by all who ask: leave nothing behind on it."""
    import comfy.model_patcher
    import comfy.sd

    case = CASES[name]
    model = model_of(case, dict(case.config))
    network = model.diffusion_model
    if case.shrink:
        case.shrink(network)
        network.requires_grad_(False).eval()
    weights = filled(network)
    if case.detected:
        return comfy.sd.load_diffusion_model_state_dict(weights)
    network.load_state_dict(weights)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


atexit.register(build.cache_clear)  # while ComfyUI is still there: a ModelPatcher detaches when it goes


def model_of(case: Tiny, options: dict):
    """ComfyUI's model with a network of these options; those that an older release doesn't know are left out."""
    import comfy.supported_models

    config = getattr(comfy.supported_models, case.kind)(dict(options))
    config.unet_config.update(options)  # after the class has had its say: some bring options of the real size
    config.set_inference_dtype(torch.float32, None)
    try:
        with torch.no_grad():
            return config.get_model(builders.fill(case.weights, 1), device=torch.device("cpu"))
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if not unknown or unknown[1] not in options:
            raise
        return model_of(case, {name: value for name, value in options.items() if name != unknown[1]})


def filled(network: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """The network's state: its weights filled, what it has computed by itself (frequencies, kernels) as it is."""
    state = network.state_dict()
    computed = {name for name, _ in network.named_buffers() if name in state and name not in FILLED_BUFFERS}
    new = builders.fill({name: tuple(v.shape) for name, v in state.items() if name not in computed}, seed)
    for weight in new.values():
        if weight.ndim == 3 and len(weight) == 1:  # a table that is added to activations, not a layer
            weight *= 0.5 / weight.std()
    return {name: state[name] if name in computed else new[name].to(state[name].dtype) for name in state}


# Buffers that a checkpoint fills: ComfyUI's constructors leave in them what lay in memory, or noise.
FILLED_BUFFERS = {
    "pos_embed", "y_embedder.y_embedding", "positive_conditioning", "negative_conditioning", "rope.inv_freq",
    "transformer.rotary_pos_emb.inv_freq",
}  # fmt: skip


def classes() -> set[str]:
    """Names of all model classes in the running release; tests are collected before ComfyUI is imported."""
    source = Path(os.environ["COMFYUI_PATH"], "comfy", "supported_models.py").read_text(encoding="utf-8")
    return set(re.findall(r"^class (\w+)\(", source, re.MULTILINE))


def available() -> list[str]:
    """Names of the entries that the running release has a class for."""
    known = classes()
    return [name for name, case in CASES.items() if case.kind in known]
