"""What merging costs the picture: python dev.py bench fidelity [--quick] [--json FILE] [--model flux|unet]

Samples the embedded demo models unmerged, merged by each method, with fewer steps and with a cache, at the same
seeds, and measures how far each picture is from the unmerged one. Speed-ups are by the FLOPs of the full-size
models with the same settings, and measured on the demo models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "training"), str(TESTS)]

from comfy_here import import_comfyui  # noqa: E402

import_comfyui(Path(tempfile.mkdtemp()))

import comfy.sample  # noqa: E402
import comfyui_toma  # noqa: E402,F401
import torch  # noqa: E402
from bench import _rivals as rivals  # noqa: E402
from bench import fullsize  # noqa: E402
from comfyui_toma.toma_core import quality  # noqa: E402
from comfyui_toma.toma_core.patcher import patch  # noqa: E402
from comfyui_toma.toma_core.settings import PRESETS, Settings  # noqa: E402
from demo_pack import captions, loading  # noqa: E402

OUT = TESTS.parent / ".dev" / "fidelity"
STEPS, CFG = 20, 2.5
LOADERS = {"flux": loading.load_demo_flux, "unet": loading.load_demo_unet}


@dataclass(frozen=True)
class Method:
    """One way to be faster: settings of ours (or of a rival in our place), fewer steps, or another node."""

    name: str
    settings: Settings | None = None
    choose: object = None
    steps: int = STEPS
    node: object = None
    note: dict = field(default_factory=dict)


def ours() -> list[Method]:
    """The presets come per family; the other points draw the curve of our method."""
    curve = [(0.5, 2), (0.75, 2), (0.5, 3), (0.75, 3), (0.5, 5), (0.75, 4), (0.75, 6), (0.9, 5)]
    return [Method("toma", Settings(ratio=r, reselect_every=n, reweight_every=n)) for r, n in curve]


def methods(family: str, quick: bool) -> list[Method]:
    plain = Settings(ratio=0.5, carry_detail=False, reselect_every=1, reweight_every=1, skip_first_blocks=0)
    paper = PRESETS["paper"][family]
    if family == "flux":
        paper = replace(paper, skip_first_blocks=1)  # 5 of 19 and 5 of 38 blocks, of the demo model's few
    ratios = (0.5,) if quick else (0.25, 0.5, 0.75)
    found = [Method("fewer steps", steps=s) for s in (17, 13, 10)]
    found += [
        Method("easycache", node=lambda m, t=t: rivals.easycache(m, t), note={"threshold": t})
        for t in (0.1, 0.3)
    ]
    found += [Method(f"preset {name}", PRESETS[name][family]) for name in ("quality", "balanced", "fast")]
    found += ours()
    found += [Method("paper", replace(paper, ratio=r)) for r in ratios]
    for name, choose in (
        ("random", rivals.random_picks),
        ("regular", rivals.regular_picks),
        ("tomesd", rivals.tomesd_matching),
    ):
        found += [Method(name, replace(plain, ratio=r), choose) for r in ratios]
    found += [Method("pooling", replace(plain, ratio=r), rivals.pooling) for r in (0.5, 0.75)]
    kv = [
        Method("keys and values", node=lambda m, r=r: rivals.keys_and_values(m, r), note={"ratio": r})
        for r in ratios
    ]
    return found + kv


def prompts(count: int, held_out: bool) -> list[str]:
    """Tuning looks at one half of the subjects, the README's figures at the other."""
    subjects = sorted(captions.SUBJECTS)[1 if held_out else 0 :: 2]
    colours = list(captions.COLOURS)
    return [f"{subjects[i % len(subjects)]} on {colours[i * 5 % len(colours)]}" for i in range(count)]


@torch.inference_mode()
def draw(
    model, codec, names: list[str], pixels: int, steps: int, batch: int = 4
) -> tuple[torch.Tensor, float]:
    """Pictures [B, H, W, 3] of the prompts, seed = index of the first of its batch, and the seconds it took."""
    pictures, seconds = [], 0.0
    for start in range(0, len(names), batch):
        part = names[start : start + batch]
        conds = [loading.encode_prompt(name, pixels, pixels)[0] for name in part]
        positive = [
            [
                torch.cat([c[0] for c in conds]),
                {"pooled_output": torch.cat([c[1]["pooled_output"] for c in conds])},
            ]
        ]
        negative = loading.encode_prompt("", pixels, pixels)
        latent = comfy.sample.fix_empty_latent_channels(
            model, loading.empty_latent(pixels, pixels, len(part))["samples"]
        )
        noise = comfy.sample.prepare_noise(latent, start)
        began = time.perf_counter()
        out = comfy.sample.sample(
            model,
            noise,
            steps,
            CFG,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            seed=start,
            disable_pbar=True,
        )
        seconds += time.perf_counter() - began
        pictures.append(codec.decode(out).clamp(0, 1))
    return torch.cat(pictures), seconds


class Evaluations:
    """Counts how often the network itself is run."""

    def __init__(self, model) -> None:
        network = model.model.diffusion_model
        first = network.img_in if hasattr(network, "img_in") else network.input_blocks[0]
        self.count = 0
        self.hook = first.register_forward_pre_hook(self._seen)

    def _seen(self, *_) -> None:
        self.count += 1

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.hook.remove()


def apart(metric, reference: torch.Tensor, picture: torch.Tensor) -> dict[str, list[float]]:
    pairs = list(zip(reference, picture))
    signed = [(p.permute(0, 3, 1, 2).float() * 2 - 1) for p in (reference, picture)]
    return {
        "psnr": [quality.psnr(a, b) for a, b in pairs],
        "ssim": [quality.ssim(a, b) for a, b in pairs],
        "lpips": metric(*signed).tolist(),
    }


def measure(model, family: str, pixels: int, names: list[str], chosen: list[Method], metric) -> list[dict]:
    codec = loading.load_demo_codec(model)
    with Evaluations(model) as full:
        reference, base_seconds = draw(model, codec, names, pixels, STEPS)
    rows, shown = [], [("unmerged", reference)]
    for method in chosen:
        patched = (
            patch(model, method.settings) if method.settings else method.node(model) if method.node else model
        )
        with Evaluations(model) as ran, rivals.chosen_by(method.choose) if method.choose else nullcontext():
            out, seconds = draw(patched, codec, names, pixels, method.steps)
        by_flops = full.count / ran.count
        if method.settings:
            by_flops *= fullsize.speedup_by_flops(family, method.settings, method.steps)
        distances = apart(metric, reference, out)
        row = {
            "model": family, "method": method.name, "pixels": pixels, "tokens": (pixels // 4) ** 2,
            "settings": {k: str(v) for k, v in asdict(method.settings).items()} if method.settings else method.note,
            "steps": method.steps, "prompts": len(names), "speedup": by_flops, "measured": base_seconds / seconds,
            **{name: statistics.mean(values) for name, values in distances.items()}, "each": distances,
        }  # fmt: skip
        rows.append(row)
        shown.append((f"{method.name} {by_flops:.2f}x", out))
        distance = f"{row['psnr']:5.1f} dB  ssim {row['ssim']:.3f}  lpips {row['lpips']:.4f}"
        print(f"{family:5} {pixels:4} {label(method):70} {by_flops:5.2f}x  {distance}", flush=True)
    return rows


def label(method: Method) -> str:
    s = method.settings
    if method.name.startswith("try"):
        return method.name
    if s is None:
        return (
            method.name
            + (f", {method.steps} steps" if method.steps != STEPS else "")
            + "".join(f", {k} {v}" for k, v in method.note.items())
        )
    every = f"every {s.reselect_every}/{s.reweight_every}, {s.start_percent:g}-{s.end_percent:g}"
    return f"{method.name}, ratio {s.ratio:g}, tile {s.tile_size}, {every}"


def parsed(text: str) -> dict:
    """Settings from "ratio=0.5,merge=each layer": values as JSON where they are, else as text."""
    found = {}
    for pair in text.split(","):
        name, value = pair.split("=")
        try:
            found[name] = json.loads(value.lower())
        except json.JSONDecodeError:
            found[name] = value
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 prompts, 1024 tokens, fewer methods")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=list(LOADERS), action="append")
    parser.add_argument("--pixels", type=int, action="append", help="128 is 1024 tokens, 256 is 4096")
    parser.add_argument("--prompts", type=int)
    parser.add_argument(
        "--tune", action="store_true", help="the prompts that settings are tuned on, not the held-out ones"
    )
    parser.add_argument("--weights", type=Path, help="another checkpoint of the one --model")
    parser.add_argument(
        "--try",
        dest="tries",
        action="append",
        metavar="ratio=0.5,tile_size=8,...",
        help="only these settings",
    )
    parser.add_argument("--only", nargs="*", help="methods whose name starts with one of these")
    options = parser.parse_args(argv)
    from lpips import LPIPS

    metric = LPIPS(TESTS.parent / ".dev" / "training")
    names = prompts(options.prompts or (4 if options.quick else 32), not options.tune)
    rows = []
    for family in options.model or list(LOADERS):
        model = LOADERS[family](options.weights) if options.weights else LOADERS[family]()
        for pixels in options.pixels or ([128] if options.quick else [128, 256]):
            chosen = methods(family, options.quick)
            if options.tries:
                chosen = [Method("try " + text, Settings(**parsed(text))) for text in options.tries]
            if options.only:
                chosen = [m for m in chosen if m.name.startswith(tuple(options.only))]
            rows += measure(model, family, pixels, names, chosen, metric)
            if options.json:
                options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
