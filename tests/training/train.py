"""Trains a demo model: python tests/training/train.py flux|unet [--million-tokens 8] [--init weights.safetensors].

Resumes by itself from the last checkpoint in the working folder. Writes log.csv, sheets of samples and
checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import networks
from data import Emoji
from demo_pack import captions, codec
from demo_pack.models import positions
from muon import Muon

DROP_CAPTION = 0.1
WORKING = Path(__file__).resolve().parents[2] / ".dev" / "training"


@dataclass(frozen=True)
class View:
    """What a batch shows: pictures of `pixels` a side, positions running over a grid of `span` tokens a side.

    `window` "all" shows every token; "stride" every n-th of a picture, "crop" a square of it: so a
    transformer sees large pictures at the price of small ones. `tokens` is the side of what is shown.
    """

    pixels: int
    span: int
    tokens: int
    batch: int
    window: str = "all"


FLUX_VIEWS = {
    "32": View(32, 32, 8, 32),
    "32-wide": View(32, 64, 8, 32),
    "64": View(64, 32, 16, 12),
    "64-wide": View(64, 64, 16, 12),
    "128-stride": View(128, 32, 16, 12, "stride"),
    "128-crop": View(128, 32, 16, 12, "crop"),
    "128": View(128, 32, 32, 4),
    "256-stride": View(256, 64, 16, 12, "stride"),
    "256-crop": View(256, 64, 16, 12, "crop"),
    "256": View(256, 64, 64, 1),
}
UNET_VIEWS = {
    "32": View(32, 8, 8, 32),
    "64": View(64, 16, 16, 12),
    "128": View(128, 32, 32, 4),
    "256": View(256, 64, 64, 1),
}
# (share of the training at which the phase ends, how often each view comes). The share is of tokens seen, which
# take about the same time in every view: a busy machine then trains slowly, but it trains the same model.
FLUX_PHASES = [
    (0.05, {"32": 3, "32-wide": 1}),
    (0.22, {"32": 1, "64": 6, "64-wide": 2}),
    (0.50, {"64": 2, "64-wide": 1, "128-stride": 1, "128": 3, "256-stride": 1}),
    (0.90, {"128": 4, "256-stride": 2, "256-crop": 1, "256": 1}),
    (1.00, {"128": 3, "256-stride": 1, "256-crop": 1, "256": 2}),
]
UNET_PHASES = [
    (0.05, {"32": 1}),
    (0.25, {"64": 6, "128": 1}),
    (0.70, {"64": 1, "128": 4}),
    (1.00, {"128": 7, "256": 1}),
]


def sample_times(batch: int, pixels: int) -> Tensor:
    """Noise levels [B] in 0..1: logit-normal, one from each B-th of it, noisier for large pictures."""
    quantiles = (torch.randperm(batch) + torch.rand(batch)) / batch
    times = torch.special.ndtri(quantiles.clamp(1e-4, 1 - 1e-4)).sigmoid()
    shift = (pixels / 32) ** 0.7
    return shift * times / (1 + (shift - 1) * times)


class Conditioning:
    """Every caption's vectors, computed once. Index len(subjects) * len(colours) is the empty caption."""

    def __init__(self, data: Emoji):
        self.names = [f"{subject} on {colour}" for subject in data.subjects for colour in data.colours] + [""]
        self.text = torch.stack([captions.encode(name, 128, 32)[0] for name in self.names])
        self.pooled: dict[tuple[int, int], Tensor] = {}

    def __call__(self, index: Tensor, view: View) -> tuple[Tensor, Tensor]:
        key = (view.pixels, view.span)
        if key not in self.pooled:
            self.pooled[key] = torch.stack([captions.encode(name, *key)[1] for name in self.names])
        return self.text[index], self.pooled[key][index]


class FluxTask:
    views, phases, channels = FLUX_VIEWS, FLUX_PHASES, 16
    muon_rate, adam_rate = 0.012, 1.2e-3

    def __init__(self, compiled: bool) -> None:
        self.network = networks.flux()
        forward = self.network.forward_orig
        self.forward = torch.compile(forward, dynamic=False) if compiled else forward
        # The four channels that only pad the latent to sixteen carry nothing worth much of the loss.
        self.weight = torch.cat([torch.ones(48), torch.full((16,), 0.25)])

    def show(self, x: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Tokens [B, N, 64] of latents x, and their positions [B, N, 3]."""
        tokens, _ = self.network.process_img(x)
        grid = view.pixels // 4
        rows = columns = torch.arange(view.tokens)
        if view.window == "stride":
            step = grid // view.tokens
            rows, columns = rows * step + random.randrange(step), columns * step + random.randrange(step)
        elif view.window == "crop":
            rows, columns = (part + random.randint(0, grid - view.tokens) for part in (rows, columns))
        place = lambda index: (index + 0.5) * (view.span / grid) - 0.5  # noqa: E731
        ids = torch.zeros(view.tokens, view.tokens, 3)
        ids[..., 1], ids[..., 2] = place(rows)[:, None], place(columns)[None]
        pick = (rows[:, None] * grid + columns[None]).flatten()
        return tokens[:, pick], ids.view(1, -1, 3).expand(len(x), -1, -1)

    def loss(self, noisy: Tensor, velocity: Tensor, times: Tensor, text: Tensor, pooled: Tensor, view: View) -> Tensor:
        tokens, ids = self.show(torch.cat([noisy, velocity], 1).unflatten(1, (2, -1)).flatten(0, 1), view)
        tokens, ids = tokens.unflatten(0, (-1, 2)), ids[: len(noisy)]
        out = self.forward(tokens[:, 0], ids, text, torch.zeros(len(text), text.shape[1], 3), times, pooled)
        return ((out - tokens[:, 1]).square() * self.weight).mean() / self.weight.mean()

    def velocity(
        self, network: nn.Module, x: Tensor, times: Tensor, text: Tensor, pooled: Tensor, view: View
    ) -> Tensor:
        scale = {
            "rope_options": {
                "scale_x": view.span / view.tokens,
                "scale_y": view.span / view.tokens,
                "shift_x": (view.span / view.tokens - 1) / 2,
                "shift_y": (view.span / view.tokens - 1) / 2,
            }
        }
        return network(x, times, text, y=pooled, transformer_options=scale)

    @staticmethod
    def is_matrix(name: str, param: Tensor) -> bool:
        return param.ndim == 2 and "blocks." in name and "mod" not in name


class UNetTask:
    views, phases, channels = UNET_VIEWS, UNET_PHASES, codec.PIXEL_CHANNELS
    muon_rate, adam_rate = 0.008, 7e-4

    def __init__(self) -> None:
        self.network = networks.unet()

    def loss(self, noisy: Tensor, velocity: Tensor, times: Tensor, text: Tensor, pooled: Tensor, view: View) -> Tensor:
        return (self.velocity(self.network, noisy, times, text, pooled, view) - velocity).square().mean()

    def velocity(
        self, network: nn.Module, x: Tensor, times: Tensor, text: Tensor, pooled: Tensor, view: View
    ) -> Tensor:
        place = positions(*x.shape[-2:]).expand(len(x), -1, -1, -1)
        return network(torch.cat([x, place], 1), times * 1000, text, y=pooled)

    @staticmethod
    def is_matrix(name: str, param: Tensor) -> bool:
        hidden = "_blocks." in name or "middle_block" in name
        return param.ndim >= 2 and hidden and "emb_layers" not in name and not name.startswith("input_blocks.0.")


class Trainer:
    def __init__(self, kind: str, folder: Path, tokens: float, compiled: bool = False):
        self.task = FluxTask(compiled) if kind == "flux" else UNetTask()
        self.folder, self.tokens = folder, tokens
        self.data = Emoji(folder.parent)
        self.conditioning = Conditioning(self.data)
        named = list(self.task.network.named_parameters())
        self.muon = Muon([p for n, p in named if self.task.is_matrix(n, p)])
        self.adam = torch.optim.AdamW(
            [p for n, p in named if not self.task.is_matrix(n, p)], betas=(0.9, 0.98), weight_decay=0
        )
        self.average = copy.deepcopy(self.task.network).requires_grad_(False)
        self.seen, self.steps = 0.0, 0

    def rate(self) -> float:
        """Learning rate factor: warm up over 50 steps, hold, fall linearly over the last 40 %."""
        left = 1 - self.seen / self.tokens
        return min(1, (self.steps + 1) / 50) * min(1, max(0.02, left / 0.4))

    def view(self) -> View:
        share = self.seen / self.tokens
        mix = next((mix for end, mix in self.task.phases if share < end), self.task.phases[-1][1])
        return self.task.views[random.choices(list(mix), list(mix.values()))[0]]

    def step(self) -> tuple[View, float]:
        view = self.view()
        subjects = torch.randint(len(self.data.subjects), (view.batch,))
        colours = torch.randint(len(self.data.colours), (view.batch,))
        clean = codec.to_latent(self.data.compose(subjects, colours, view.pixels), self.task.channels)
        caption = subjects * len(self.data.colours) + colours
        caption[torch.rand(view.batch) < DROP_CAPTION] = len(self.conditioning.names) - 1
        text, pooled = self.conditioning(caption, view)
        times = sample_times(view.batch, view.pixels)
        noise = torch.randn_like(clean)
        noisy = torch.lerp(clean, noise, times[:, None, None, None])
        loss = self.task.loss(noisy, noise - clean, times, text, pooled, view)
        loss.backward()
        self._update()
        return view, loss.item()

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        self.muon.param_groups[0]["lr"] = self.task.muon_rate * self.rate()
        self.adam.param_groups[0]["lr"] = self.task.adam_rate * self.rate()
        for optimizer in (self.muon, self.adam):
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        decay = min(0.995, self.steps / (self.steps + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.task.network.parameters()), 1 - decay)

    def save(self) -> None:
        state = {
            "network": self.task.network.state_dict(),
            "average": self.average.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "seen": self.seen,
            "steps": self.steps,
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")

    def resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path)
            self.task.network.load_state_dict(state["network"])
            self.average.load_state_dict(state["average"])
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])
            self.seen, self.steps = state["seen"], state["steps"]

    def start_from(self, weights: Path) -> None:
        state = {name: value.float() for name, value in load_file(weights).items()}
        self.task.network.load_state_dict(state)
        self.average.load_state_dict(state)

    @torch.no_grad()
    def sheet(self, pixels: int, steps: int = 10, cfg: float = 2.5, count: int = 8) -> None:
        """A row of samples of fixed captions and seeds, so that sheets can be compared over time."""
        view = next(view for view in self.task.views.values() if view.pixels == pixels and view.window == "all")
        index = torch.arange(count) * 61 % (len(self.conditioning.names) - 1)
        index = torch.cat([index, torch.full((count,), len(self.conditioning.names) - 1)])
        text, pooled = self.conditioning(index, view)
        x = torch.randn(count, self.task.channels, pixels // 2, pixels // 2, generator=torch.Generator().manual_seed(0))
        times = torch.linspace(1, 0, steps + 1)
        times = 3 * times / (1 + 2 * times)
        for now, then in zip(times[:-1], times[1:]):
            out = self.task.velocity(self.average, torch.cat([x, x]), now.expand(2 * count), text, pooled, view)
            wanted, plain = out.chunk(2)
            x = x + (then - now) * (plain + cfg * (wanted - plain))
        row = codec.to_image(x).clamp(-1, 1).permute(2, 0, 3, 1).reshape(pixels, -1, 3)
        Image.fromarray(((row + 1) * 127.5).byte().numpy()).save(self.folder / f"sheet-{self.steps:06d}-{pixels}.png")

    def run(self) -> None:
        saved = drawn = time.monotonic()
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        while self.seen < self.tokens and not stopped:
            start = time.monotonic()
            view, loss = self.step()
            now = time.monotonic()
            self.seen += view.batch * view.tokens**2
            with open(self.folder / "log.csv", "a") as log:
                shown = f"{view.pixels},{view.window},{view.batch}"
                log.write(f"{self.steps},{self.seen:.0f},{shown},{loss:.5f},{now - start:.2f}\n")
            if now - saved > 240:
                self.save()
                saved = now
            if now - drawn > 600:
                self.sheet(64 if self.seen < 0.3 * self.tokens else 128)
                drawn = time.monotonic()
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["flux", "unet"])
    parser.add_argument("--million-tokens", type=float, default=8, help="to see in all, over every resume")
    parser.add_argument("--folder", type=Path, default=WORKING)
    parser.add_argument("--init", type=Path, help="start from exported weights, if there is no checkpoint")
    parser.add_argument("--skip", type=float, default=0, help="with --init: the share of the schedule to leave out")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="Flux: a fifth faster, after minutes of compiling for each of four shapes",
    )
    parser.add_argument("--export", type=Path, help="only write the averaged weights of the last checkpoint, fp16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.seed()  # a resumed run must not see the same noise again
    folder = options.folder / options.kind
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options.kind, folder, options.million_tokens * 1e6, options.compile)
    if options.init:
        trainer.start_from(options.init)
        trainer.seen = options.skip * trainer.tokens
    trainer.resume()
    if options.export and not trainer.seen:
        parser.error("--export: there is no checkpoint to write the weights of; train first, or name --folder")
    if options.export:
        save_file({n: p.half().contiguous() for n, p in trainer.average.state_dict().items()}, options.export)
    else:
        trainer.run()


if __name__ == "__main__":
    main()
