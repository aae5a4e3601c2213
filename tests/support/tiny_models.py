"""Every model that ComfyUI samples, tiny: a table with one entry a model, and how an entry is built and sampled.

    case = CASES["wan21_t2v"]
    model = build("wan21_t2v")              # a ModelPatcher around ComfyUI's own classes, built once
    latent = sample(case, model, steps=3)

Weights are random, seeded, and nowhere zero. The entries lie in tiny_image.py, tiny_video.py, tiny_unet.py and
tiny_other.py; what cannot be sampled is in NOT_SAMPLED, with the reason. ComfyUI must be imported already.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import builders
import torch


@dataclass(frozen=True)
class Tiny:
    """One model. `config` is what ComfyUI's detection would read off the weights, at tiny sizes."""

    name: str
    kind: str  # class in comfy.supported_models
    config: dict
    shape: tuple = (16, 16, 16)  # latent without batch: C, [frames,] rows, columns; several: a nested latent
    result: tuple | None = None  # shape of what sampling gives back, where the latent format makes it another
    text: int | None = 64  # width of the prompt's tokens
    tokens: int = builders.TEXT_TOKENS
    pooled: int | None = None
    cfg: float = 3.0
    detected: bool = False  # ComfyUI recognises these weights: loaded as UNETLoader does it
    extra: Callable[[Given], dict] | None = None  # more keys of the conditioning
    batch: int = 1  # frames that travel as a batch
    frame_kept: bool = False  # image to video by a noise mask: the first frame is given
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what get_model reads, by name
    shrink: Callable | None = None  # called with the new network: parts whose size is no option
    steps: int = 3
    sampler: str = "euler"
    why: str = ""  # why its tokens are not merged, some words of it; nothing: they are
    since: str = ""  # the release from which on they can be
    odd: bool = True  # ComfyUI itself samples it at sizes that are no multiple of a patch
    pairs: bool = True  # and two images at once


@dataclass(frozen=True)
class Given:
    """What an entry's `extra` may look at: the entry, its latent's shape(s) with batch, and a source of noise."""

    case: Tiny
    shape: tuple
    generator: torch.Generator

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def references(given: Given) -> dict:
    """Reference latents as the node ReferenceLatent adds them: two, the second of another size."""
    *start, rows, columns = given.shape
    return {"reference_latents": [given.noise(*given.shape), given.noise(*start, rows // 2, columns)]}


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
    import comfy.nested_tensor

    shape = latent_shape(case, **size)
    if isinstance(shape[0], tuple):
        return comfy.nested_tensor.NestedTensor([torch.zeros(part) for part in shape])
    return torch.zeros(shape)


def conditioning(case: Tiny, seed: int = 1, batch: int = 1, **size) -> list:
    """CONDITIONING, as the nodes of this model would give it."""
    given = Given(case, latent_shape(case, batch=batch, **size), torch.Generator().manual_seed(seed))
    text = None if case.text is None else given.noise(batch, case.tokens, case.text)
    pooled = given.noise(batch, case.pooled) if case.pooled else None
    return [[text, {"pooled_output": pooled, **(case.extra(given) if case.extra else {})}]]


def sample(case: Tiny, model, rows: int | None = None, columns: int | None = None, frames: int | None = None,
           batch: int = 1, **options):  # fmt: skip
    """One run of ComfyUI's own sampling: the final latent. Sizes count latent cells; options: builders.sample."""
    size = {"rows": rows, "columns": columns, "frames": frames, "batch": batch}
    latent = empty_latent(case, **size)
    if case.frame_kept:
        latent[:, :, :1] = torch.randn(latent[:, :, :1].shape, generator=torch.Generator().manual_seed(3))
        mask = torch.ones(batch, 1, *latent.shape[2:])
        mask[:, :, :1] = 0
        options.setdefault("noise_mask", mask)
    defaults = {
        "latent": latent, "steps": case.steps, "cfg": case.cfg, "sampler": case.sampler,
        "positive": conditioning(case, 1, **size), "negative": conditioning(case, 2, **size),
    }  # fmt: skip
    return builders.sample(model, **{**defaults, **options})


@cache
def build(name: str, dtype: torch.dtype = torch.float32):
    """The model of an entry, a ModelPatcher. Shared by all who ask: leave nothing behind on it."""
    import comfy.model_patcher
    import comfy.sd

    case = CASES[name]
    config = model_config(case, dtype)
    with torch.no_grad():  # as in ComfyUI; weights of 0.16 ask for gradients
        model = config.get_model(builders.fill(case.weights, 1), device=torch.device("cpu")).requires_grad_(False)
    network = model.diffusion_model
    if case.shrink:
        case.shrink(network)
        network.requires_grad_(False).eval().to(dtype)
    weights = filled(network)
    if case.detected:
        return comfy.sd.load_diffusion_model_state_dict(weights, {"dtype": dtype})
    network.load_state_dict(weights)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


atexit.register(build.cache_clear)  # while ComfyUI is still there: a ModelPatcher detaches when it goes


def model_config(case: Tiny, dtype: torch.dtype):
    import comfy.supported_models

    config = getattr(comfy.supported_models, case.kind)(dict(case.config))
    # after the class has had its say: some add options of their own
    config.unet_config.update(case.config)
    for option in unknown_here(case.kind):
        config.unet_config.pop(option, None)
    config.set_inference_dtype(dtype, None)
    return config


# Options that a network has only in newer releases. Older ones take no option that they don't know.
NEWER = {
    "ACEStep15": ("ace.ace_step15", "encoder_hidden_size", "encoder_intermediate_size", "encoder_num_heads"),
    "ChromaRadiance": ("chroma_radiance.model", "use_sequential_txt_ids"),
    "StableAudio": ("audio.dit", "timestep_features_type"),
}


def unknown_here(kind: str) -> list[str]:
    module, *options = NEWER.get(kind, ("",))
    source = inspect.getsource(importlib.import_module(f"comfy.ldm.{module}")) if module else ""
    return [option for option in options if option not in source]


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


def release() -> tuple[int, ...]:
    """The running release, as (0, 30, 0)."""
    source = Path(os.environ["COMFYUI_PATH"], "comfyui_version.py").read_text(encoding="utf-8")
    return tuple(map(int, re.findall(r"\d+", source.rpartition("=")[2])))


def merged() -> list[str]:
    """Names of the entries whose tokens are merged on the running release."""

    def there(case: Tiny) -> bool:
        return not case.why and release() >= tuple(map(int, case.since.split(".") if case.since else ()))

    return [name for name in available() if there(CASES[name])]


def available() -> list[str]:
    """Names of the entries that the running release has a class for."""
    known = classes()
    return [name for name, case in CASES.items() if case.kind in known]


CASES: dict[str, Tiny] = {}
NOT_SAMPLED: dict[str, str] = {}  # class in comfy.supported_models -> why there is no entry


def _fill_table() -> None:
    import tiny_image
    import tiny_other
    import tiny_unet
    import tiny_video

    for entries in (tiny_image, tiny_video, tiny_unet, tiny_other):
        CASES.update({case.name: case for case in entries.CASES})
        NOT_SAMPLED.update(entries.NOT_SAMPLED)


_fill_table()
