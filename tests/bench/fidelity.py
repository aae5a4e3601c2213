"""What merging costs the picture: python dev.py bench fidelity [--quick] [--json FILE] [--model flux|unet]

Samples the embedded demo models unmerged, merged by each method, with fewer steps and with a cache, at the same
seeds, and measures how far each picture is from the unmerged one. Speed-ups are by the FLOPs of the full-size
models with the same settings, and measured on the demo models. Prompt by prompt the methods take their turn, and
what was drawn is kept in .dev/fidelity: an interrupted run goes on where it was. Each row says how many prompts
it is from: one that --minutes ended early has fewer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
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
from bench.fidelitylib import report  # noqa: E402
from bench.fidelitylib.distances import Distances  # noqa: E402
from bench.fidelitylib.options import BATCH, FAMILIES, checked, chosen_points, number_of_prompts  # noqa: E402
from bench.fidelitylib.points import Point  # noqa: E402
from comfyui_toma.toma_core.patcher import patch  # noqa: E402
from demo_pack import captions, loading  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

OUT = TESTS.parent / ".dev" / "fidelity"
DOWNLOADS = TESTS.parent / ".dev" / "training"
MODELS = {
    "flux": (loading.load_demo_flux, loading.FLUX_FILE, 1.0),  # as Flux is run: without guidance
    "unet": (loading.load_demo_unet, loading.UNET_FILE, 2.5),
}


def prompts(count: int, held_out: bool) -> list[str]:
    """Tuning looks at one half of the subjects, the README's figures at the other."""
    subjects = sorted(captions.SUBJECTS)[1 if held_out else 0 :: 2]
    colours = list(captions.COLOURS)
    return [f"{subjects[i % len(subjects)]} on {colours[i * 5 % len(colours)]}" for i in range(count)]


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

    family: str
    pixels: int
    cfg: float
    model: object
    weights: Path
    names: list[str]
    first: int = 0  # of the names, where an earlier run ended
    codec: object = field(init=False)

    def __post_init__(self) -> None:
        self.codec = loading.load_demo_codec(self.model)
        sources = [self.weights, *sorted((TESTS.parent / "toma_core").rglob("*.py")), Path(rivals.__file__)]
        self.version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def batches(self) -> list[list[str]]:
        return [self.names[i : i + BATCH] for i in range(self.first, len(self.names), BATCH)]

    def path(self, point: Point, batch: list[str]) -> Path:
        about = json.dumps([self.version, self.pixels, self.cfg, point.key, batch])
        return OUT / "pictures" / f"{hashlib.sha256(about.encode()).hexdigest()[:20]}.safetensors"

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


def by_flops(family: str, point: Point, pairs: list[tuple[Drawn, Drawn]]) -> float:
    """Speed-up of the full-size model: by the schedule, and with a cache by what was evaluated and merged."""
    total = fullsize.parts(family).total()
    if point.cache is not None:
        spent = total * sum(drawn.evaluations for _, drawn in pairs)
        if point.settings:
            saved = total - fullsize.merged_total(family, point.settings)
            spent -= saved * sum(drawn.merged for _, drawn in pairs)
        return point.of_steps * len(pairs) * total / spent
    faster = 1.0
    if point.settings:
        faster = fullsize.speedup_by_flops(family, point.settings, point.steps, reuse=bool(point.reuse))
    if point.keys_and_values is not None:
        faster = total / (total - fullsize.saved_by_keys_and_values(family, point.keys_and_values))
    return faster * point.of_steps / point.steps


def rows_of(studio: Studio, chosen: list[Point], distances: Distances) -> tuple[list[dict], dict]:
    """A row a point, over the prompts that it was drawn for; and the first pictures of each, to look at."""
    rows, shown, references = [], {}, {}
    for point in sorted(chosen, key=lambda p: -p.of_steps):
        pairs = []
        for batch in studio.batches():
            base, drawn = studio.drawn(unmerged(point.of_steps), batch), studio.drawn(point, batch)
            if base is None or drawn is None:
                break
            pairs.append((base, drawn))
        if not pairs:
            continue
        reference, pictures = (torch.cat([pair[side].pictures for pair in pairs]) for side in (0, 1))
        # one tensor for all points of a reference: what was measured of it is known by that
        reference = references.setdefault((point.of_steps, len(pairs)), reference)
        names = studio.names[studio.first :][: len(pictures)]
        colours = torch.tensor([captions.COLOURS[name.split(" on ")[1]] for name in names]) / 255
        each = distances(reference, pictures, colours)
        flops = by_flops(studio.family, point, pairs)
        faster = [base.seconds / drawn.seconds for base, drawn in pairs]
        row = {
            "model": studio.family, "method": point.method, "label": point.label, "against": point.against,
            "tokens": (studio.pixels // loading.PIXELS_PER_TOKEN) ** 2, "settings": point.describe(),
            "first": studio.first, "prompts": len(names), "steps": point.steps, "of_steps": point.of_steps,
            "cfg": studio.cfg, "speedup": flops, "measured": report.median(faster),
            "measured_spread": [min(faster), max(faster)],
            **{name: report.mean(values) for name, values in each.items()}, "each": each,
        }  # fmt: skip
        rows.append(row)
        shown.setdefault(f"unmerged, {point.of_steps} steps", reference[:8])
        shown[f"{point.method} {flops:.2f}x" + (f" ({point.against})" if point.against else "")] = pictures[
            :8
        ]
    return rows, shown


def unmerged(steps: int) -> Point:
    return Point("unmerged", steps=steps, of_steps=steps)


def with_references(chosen: list[Point]) -> list[Point]:
    return [unmerged(steps) for steps in dict.fromkeys(p.of_steps for p in chosen)] + chosen


def draw_all(studio: Studio, chosen: list[Point], until: float) -> None:
    """Batch by batch, first the points that decide and then the others, until all are there or time is up."""
    for some in ([p for p in chosen if p.decides], [p for p in chosen if not p.decides]):
        for batch in studio.batches():
            for point in with_references(some):
                if not studio.path(point, batch).is_file():
                    if time.monotonic() > until:
                        print(
                            f"{studio.family}, {studio.pixels} px: time is up, not all is drawn", flush=True
                        )
                        return
                    studio.draw(point, batch)
            drawn = studio.names.index(batch[-1]) + 1
            print(f"{studio.family}, {studio.pixels} px: {len(some)} methods, prompts to {drawn}", flush=True)


def earlier(paths: list[Path]) -> list[dict]:
    """The rows of files that this benchmark wrote."""
    rows = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["rows"]
            rows += [row for row in found if row["each"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"--read {path}: not a file that this benchmark wrote ({error!r})") from None
    return report.joined(rows)


def main(argv: list[str] | None = None) -> None:
    options = checked(__doc__, argv)
    rows = measured(options) if options.read is None else earlier(options.read)
    if not rows:
        raise SystemExit("Nothing was drawn, and nothing is written.")
    if not options.tries:
        for family, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in rows):
            here = [row for row in rows if (row["model"], row["tokens"]) == (family, tokens)]
            report.plot(here, OUT / f"frontier-{family}-{tokens}-tokens.png")
    findings = report.findings(rows)
    print("\n".join(findings))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "findings": findings}, indent=1))
    if options.write:
        report.write_table(rows, options.write)
    print(f"Plots and contact sheets: {OUT.relative_to(TESTS.parent)}")


def measured(options: argparse.Namespace) -> list[dict]:
    """Draws what is missing, and measures it."""
    distances = Distances(DOWNLOADS, not options.no_inception)
    names = prompts(number_of_prompts(options), not options.tune)
    until = time.monotonic() + 60 * options.minutes
    rows = []
    for pixels in options.pixels or ([128] if options.quick else [128, 256]):
        for family in options.model or FAMILIES:
            load, weights, cfg = MODELS[family]
            weights = options.weights or weights
            cfg = cfg if options.cfg is None else options.cfg
            studio = Studio(family, pixels, cfg, load(weights), weights, names, options.first)
            chosen = chosen_points(family, options)
            draw_all(studio, chosen, until)
            found, shown = rows_of(studio, chosen, distances)
            rows += found
            report.print_table(found)
            if found and not options.tries:
                report.sheet(shown, OUT / f"sheet-{family}-{pixels}.png")
                if presets := report.of_presets(shown):
                    report.sheet(presets, OUT / f"presets-{family}-{pixels}.jpg")
    return rows


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped; the same command goes on where it was.") from None
