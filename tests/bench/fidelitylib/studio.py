"""Draws with a demo model, one image at a time, and keeps what it drew by all that decides it."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import comfy.sample
import torch
from bench import fullsize
from comfyui_toma.toma_core.patcher.families.base import KEY
from demo_pack import loading
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .methods import Point
from .regimes import PIXELS, Regime

TESTS = Path(__file__).resolve().parents[2]
RIVALS = TESTS / "bench" / "rivals"
NOT_DECIDING = ("overlay.py", "quality.py", "report.py")  # of toma_core
OTHER_SEED = 10_000


@dataclass(frozen=True)
class Drawn:
    """An image [H, W, 3] and what it took: `ran` network evaluations, of these `merged` on fewer tokens."""

    image: Tensor
    ran: float
    merged: int
    kinds: str  # F full, M merged, S forecast; of a rival empty
    seconds: float

    def work(self, regime: Regime, point: Point) -> float:
        """In full evaluations of the full-size model."""
        if not self.merged:
            return self.ran
        return self.ran - self.merged * (1 - fullsize.merged_share(regime.family, point.settings))


class Watch:
    """Counts how often the network runs. With little memory ComfyUI runs prompt and negative prompt one after the
    other: `rows` is the batch of both."""

    def __init__(self, model, rows: int) -> None:
        network = model.model.diffusion_model
        first = network.img_in if hasattr(network, "img_in") else network.input_blocks[0][0]
        self.rows, self.ran = rows, 0.0
        self.hook = first.register_forward_pre_hook(self._count)

    def _count(self, module, args) -> None:
        self.ran += len(args[0]) / self.rows

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_) -> None:
        self.hook.remove()


@dataclass
class Studio:
    """Draws in one regime."""

    folder: Path
    regime: Regime
    model: object
    weights: tuple[Path, ...]
    names: list[str]
    codec: object = field(init=False)

    def __post_init__(self) -> None:
        self.codec = loading.load_demo_codec(self.model)

    def key(self, point: Point, name: str) -> str:
        r = self.regime
        about = [r.model, r.tokens, r.sampler, r.scheduler, r.cfg, point.key, name, self.seed(point, name)]
        code = [digest(source) for source in ("demo", *point.sources)]
        files = [_of_file(path) for path in self.weights]
        return hashlib.sha256(json.dumps([about, code, files]).encode()).hexdigest()[:24]

    def seed(self, point: Point, name: str) -> int:
        return self.names.index(name) + OTHER_SEED * point.other_seed

    def path(self, point: Point, name: str) -> Path:
        return self.folder / "images" / f"{self.key(point, name)}.safetensors"

    def is_drawn(self, point: Point, name: str) -> bool:
        return self.path(point, name).is_file()

    def drawn(self, point: Point, name: str) -> Drawn:
        with safe_open(self.path(point, name), "pt") as file:
            return Drawn(file.get_tensor("image").float(), **json.loads(file.metadata()["about"]))

    def draw(self, point: Point, name: str) -> Drawn:
        found = self.sample(point, name)
        path = self.path(point, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"ran": found.ran, "merged": found.merged, "kinds": found.kinds, "seconds": found.seconds}
        part = path.with_suffix(f".{time.monotonic_ns()}")
        save_file({"image": found.image.half().contiguous()}, part, {"about": json.dumps(about)})
        part.replace(path)
        return found

    @torch.inference_mode()
    def sample(self, point: Point, name: str) -> Drawn:
        """One image by the code that the KSampler node runs."""
        regime, size = self.regime, (PIXELS[self.regime.tokens],) * 2
        model, seed = point.make(self.model), self.seed(point, name)
        latent = comfy.sample.fix_empty_latent_channels(model, loading.empty_latent(*size)["samples"])
        noise = comfy.sample.prepare_noise(latent, seed)
        positive, negative = (loading.encode_prompt(text, *size) for text in (name, ""))
        run = (noise, point.steps, regime.cfg, regime.sampler, regime.scheduler, positive, negative, latent)
        with Watch(self.model, 1 if regime.cfg == 1 else 2) as watch:
            began = time.process_time()
            out = comfy.sample.sample(model, *run, seed=seed, disable_pbar=True)
            seconds = time.process_time() - began
        handle = model.model_options.get(KEY)
        kinds = (
            "".join({"full": "F", "merged": "M"}.get(kind, "S") for kind in handle.reports[-1].kinds) if handle else ""
        )
        return Drawn(self.codec.decode(out).clamp(0, 1)[0], watch.ran, kinds.count("M"), kinds, seconds)


@cache
def digest(source: str) -> str:
    """Of the code behind an image, without comments and docstrings: "core", "demo", or a file of rivals."""
    if source == "core caches":
        return _of_file(Path(os.environ["COMFYUI_PATH"]) / "comfy_extras" / "nodes_easycache.py")
    if source == "core":
        paths = [p for p in sorted((TESTS.parent / "toma_core").rglob("*.py")) if p.name not in NOT_DECIDING]
    elif source == "demo":
        paths = [TESTS / "demo_pack" / name for name in ("captions.py", "codec.py", "loading.py", "models.py")]
        paths += [Path(os.environ["COMFYUI_PATH"]) / "comfyui_version.py"]
    else:
        paths = [RIVALS / f"{source}.py"]
    return hashlib.sha256("".join(map(_code, paths)).encode()).hexdigest()


def _code(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body.pop(0)
    return ast.dump(tree)


@cache
def _of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def dialled(
    wanted: float, speed_at: Callable[[float], float], dial: tuple[float, float], rungs: int = 25
) -> float | None:
    """The number on a ladder from dial[0] to dial[1] whose speed-up is nearest the wanted one, by halving: speed-ups
    grow with the number. None if it stays a quarter off."""
    ladder = [dial[0] * (dial[1] / dial[0]) ** (i / (rungs - 1)) for i in range(rungs)]
    low, high = 0, rungs - 1
    while high - low > 1:
        middle = (low + high) // 2
        if speed_at(ladder[middle]) < wanted:
            low = middle
        else:
            high = middle
    best = min((ladder[low], ladder[high]), key=lambda value: abs(speed_at(value) - wanted))
    return best if abs(speed_at(best) / wanted - 1) < 0.25 else None
