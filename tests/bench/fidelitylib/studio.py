"""Draws with a demo model, unmerged and in every other way, and keeps what it drew."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import comfy.sample
import torch
from bench import _rivals as rivals
from comfyui_toma.toma_core.patcher import patch
from demo_pack import loading
from safetensors import safe_open
from safetensors.torch import save_file

from .options import BATCH
from .points import Point

TESTS = Path(__file__).resolve().parents[2]


@dataclass
class Drawn:
    """Pictures [B, H, W, 3] of one batch of prompts, and what they took."""

    pictures: torch.Tensor
    seconds: float
    evaluations: float  # of the network
    merged: float  # of these, how many on merged tokens


class Watch:
    """Counts how often the network is run, and how often its last self-attention gets fewer tokens. With little
    memory ComfyUI runs prompt and negative prompt one after the other: `rows` is the batch of both."""

    def __init__(self, model, tokens: int, rows: int) -> None:
        network = model.model.diffusion_model
        if hasattr(network, "double_blocks"):
            first, last = network.img_in, network.double_blocks[-1].img_attn.qkv
        else:
            first, last = (
                network.input_blocks[0][0],
                network.middle_block[1].transformer_blocks[-1].attn1.to_q,
            )
            tokens //= 4  # the middle of the UNet
        self.tokens, self.rows, self.evaluations, self.merged = tokens, rows, 0.0, 0.0
        self.hooks = [
            first.register_forward_pre_hook(self._ran),
            last.register_forward_pre_hook(self._attended),
        ]

    def _ran(self, module, args) -> None:
        self.evaluations += len(args[0]) / self.rows

    def _attended(self, module, args) -> None:
        self.merged += len(args[0]) / self.rows * (args[0].shape[1] < self.tokens)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


@dataclass
class Studio:
    """Draws with one demo model at one size, and keeps what it drew."""

    folder: Path
    family: str
    pixels: int
    cfg: float
    model: object
    weights: Path
    names: list[str]
    held_out: bool = True  # whether settings were not tuned on these names
    first: int = 0  # of the names, where an earlier run ended
    codec: object = field(init=False)

    def __post_init__(self) -> None:
        self.codec = loading.load_demo_codec(self.model)
        self.version = _version(self.weights)

    def batches(self) -> list[list[str]]:
        return [self.names[i : i + BATCH] for i in range(self.first, len(self.names), BATCH)]

    def path(self, point: Point, batch: list[str]) -> Path:
        about = json.dumps([self.version, self.pixels, self.cfg, point.key, batch])
        return self.folder / "pictures" / f"{hashlib.sha256(about.encode()).hexdigest()[:20]}.safetensors"

    def drawn(self, point: Point, batch: list[str]) -> Drawn | None:
        path = self.path(point, batch)
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            return Drawn(file.get_tensor("pictures").float(), **about)

    def draw(self, point: Point, batch: list[str]) -> None:
        found = self.sample(point, batch)
        path = self.path(point, batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"seconds": found.seconds, "evaluations": found.evaluations, "merged": found.merged}
        part = path.with_suffix(f".{time.monotonic_ns()}")
        save_file({"pictures": found.pictures.half().contiguous()}, part, {"about": json.dumps(about)})
        part.replace(path)

    def patched(self, point: Point):
        model = self.model
        if point.cache is not None:
            model = rivals.easycache(model, point.cache)
        if point.keys_and_values is not None:
            model = rivals.keys_and_values(model, point.keys_and_values)
        return patch(model, point.on_demo()) if point.settings else model

    @torch.inference_mode()
    def sample(self, point: Point, batch: list[str]) -> Drawn:
        """One batch by ComfyUI's sampler; the seed is the index of its first prompt."""
        size, seed = (self.pixels, self.pixels), self.names.index(batch[0])
        conds = [loading.encode_prompt(name, *size)[0] for name in batch]
        text = torch.cat([c[0] for c in conds])
        positive = [[text, {"pooled_output": torch.cat([c[1]["pooled_output"] for c in conds])}]]
        negative = loading.encode_prompt("", *size)
        model = self.patched(point)
        latent = loading.empty_latent(*size, len(batch))["samples"]
        latent = comfy.sample.fix_empty_latent_channels(model, latent)
        noise = comfy.sample.prepare_noise(latent, seed)
        run = (noise, point.steps, self.cfg, "euler", "simple", positive, negative, latent)
        tokens = (self.pixels // loading.PIXELS_PER_TOKEN) ** 2
        with (
            Watch(self.model, tokens, len(batch) * (1 if self.cfg == 1 else 2)) as watch,
            rivals.chosen_by(point.choose) if point.choose else nullcontext(),
            rivals.nothing_computed(point.reuse == "drifting") if point.reuse else nullcontext(),
        ):
            began = time.process_time()  # the machine may be busy, or the unmerged run of another day
            out = comfy.sample.sample(model, *run, seed=seed, disable_pbar=True)
            seconds = time.process_time() - began
        return Drawn(self.codec.decode(out).clamp(0, 1), seconds, watch.evaluations, watch.merged)


def _version(weights: Path) -> str:
    """A hash of all that a picture is drawn with: another one is another picture."""
    code = [TESTS.parent / "toma_core", TESTS / "demo_pack"]
    sources = [weights, *(path for folder in code for path in sorted(folder.rglob("*.py")))]
    sources += [
        Path(rivals.__file__),
        Path(__file__),
        Path(os.environ["COMFYUI_PATH"]) / "comfyui_version.py",
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
