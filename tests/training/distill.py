"""Distils the demo Flux to four steps: python tests/training/distill.py [--minutes 65] [--export lora.safetensors].

The teacher is the demo Flux with classifier-free guidance and a second-order solver; the student is the same
network with a LoRA, run in four Euler steps without guidance. The loss compares where each step of the student
lands with where the teacher's trajectory from the same noise passes, on states that the student itself reached.
Resumes by itself from the last checkpoint in the working folder; trajectories stay there, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import networks
from data import caption_names, held_out_captions
from demo_pack import captions, codec
from lpips import LPIPS

TESTS = Path(__file__).resolve().parents[1]
WORKING = TESTS.parent / ".dev" / "training"
TEACHER_FILE = TESTS / "demo_pack" / "models" / "toma_demo_flux.safetensors"

PIXELS, CHANNELS, SHIFT = 128, 16, 3.0
GUIDANCE = 2.5
STAGES = 4  # steps of the student
TEACHER_STEPS = (2, 2, 3, 6)  # of the teacher within each step of the student: the end bends most
SHARD = 4  # trajectories drawn at once

RANK = 44
RATE = 1e-3
LPIPS_WEIGHT = 0.25
PADDING_WEIGHT = 0.25  # of the four channels that only pad the latent to sixteen
FIRST_SHARDS = 4
DRAWING_SHARE = 0.35  # of the time, for new trajectories, until DRAWING_ENDS of it has passed
DRAWING_ENDS = 0.8


def sigmas(times: Tensor) -> Tensor:
    """Noise levels in 0..1 at uniform times in 0..1, with the shift that the demo Flux is sampled with."""
    return SHIFT * times / (1 + (SHIFT - 1) * times)


STUDENT_SIGMAS = sigmas(torch.linspace(1, 0, STAGES + 1))  # what scheduler `simple` gives for four steps


def conditioning(names: list[str]) -> tuple[Tensor, Tensor]:
    """Text [B, 12, 256] and pooled vectors [B, 256]."""
    text, pooled = zip(*(captions.encode(name, PIXELS, PIXELS // 4) for name in names))
    return torch.stack(text), torch.stack(pooled)


def load_teacher() -> nn.Module:
    network = networks.flux()
    network.load_state_dict({name: value.float() for name, value in load_file(TEACHER_FILE).items()})
    return network.requires_grad_(False)


def velocity(network: nn.Module, x: Tensor, sigma: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
    """dx/dsigma [B, 16, 64, 64] at x and noise levels sigma [B]. bfloat16 is a third faster here, 0.5 % off."""
    with torch.autocast("cpu", torch.bfloat16):
        return network(x, sigma, text, y=pooled).float()


def guided_velocity(network: nn.Module, x: Tensor, sigma: Tensor, names: list[str]) -> Tensor:
    text, pooled = conditioning(names + [""] * len(names))
    out = velocity(network, torch.cat([x, x]), sigma.expand(2 * len(x)), text, pooled)
    wanted, plain = out.chunk(2)
    return plain + GUIDANCE * (wanted - plain)


@torch.no_grad()
def draw_trajectories(network: nn.Module, names: list[str], noise: Tensor) -> Tensor:
    """The teacher's x at the student's five noise levels, [B, 5, 16, 64, 64], by Adams-Bashforth of order two."""
    x, states, last = noise, [noise], None
    for stage, steps in enumerate(TEACHER_STEPS):
        grid = sigmas(torch.linspace(1 - stage / STAGES, 1 - (stage + 1) / STAGES, steps + 1))
        for now, then in zip(grid[:-1], grid[1:]):
            slope = guided_velocity(network, x, now, names)
            bend = 0.0
            if last is not None:
                before, slope_before = last
                bend = (then - now) / (now - before) / 2 * (slope - slope_before)
            x, last = x + (then - now) * (slope + bend), (now, slope)
        states.append(x)
    return torch.stack(states, 1)


class LoRALinear(nn.Module):
    """y = W x + b + up (down x), with W and b fixed; up starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        rank = min(rank, linear.in_features, linear.out_features)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


def add_lora(network: nn.Module, rank: int = RANK) -> dict[str, LoRALinear]:
    """Puts a LoRA on every linear layer of the blocks and of the last layer; returns them by name."""
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(("double_blocks.", "single_blocks.", "final_layer."))
    }
    loras = {}
    for name, linear in layers.items():
        parent, _, child = name.rpartition(".")
        loras[name] = LoRALinear(linear, rank)
        setattr(network.get_submodule(parent), child, loras[name])
    return loras


class Trajectories:
    """Trajectories of the teacher on disk, in shards; a growing set that is held in memory as fp16."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        names, held_out = caption_names(), set(held_out_captions())
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
        self.order = [names[i] for i in order if names[i] not in held_out]
        self.names: list[str] = []
        self.states: list[Tensor] = []  # each [5, 16, 64, 64]
        self.queue: list[int] = []
        self.shards = 0
        while (path := self._path()).is_file():
            self._add(path)

    def _path(self) -> Path:
        return self.folder / f"{self.shards:04d}.safetensors"

    def _add(self, path: Path) -> None:
        self.names += self._shard_names()
        self.states += list(load_file(path)["states"])
        self.shards += 1

    def _shard_names(self) -> list[str]:
        return [self.order[(self.shards * SHARD + i) % len(self.order)] for i in range(SHARD)]

    def draw(self, teacher: nn.Module) -> None:
        noise = torch.randn(
            SHARD,
            CHANNELS,
            PIXELS // 2,
            PIXELS // 2,
            generator=torch.Generator().manual_seed(10**6 + self.shards),
        )
        path = self._path()
        states = draw_trajectories(teacher, self._shard_names(), noise)
        save_file({"states": states.half().contiguous()}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        self._add(path)

    def next(self) -> int:
        """Index of a trajectory: each comes once before any comes again."""
        if not self.queue:
            self.queue = torch.randperm(len(self.names)).tolist()
        return self.queue.pop()


class Distiller:
    """Row k of a batch is at the student's step k. After each update the rows move on by one step, to where the
    student landed: so it learns from its own states, and rolling it out costs nothing."""

    def __init__(self, folder: Path, minutes: float):
        self.folder, self.budget = folder, minutes * 60
        self.teacher, self.student = load_teacher(), load_teacher()
        self.loras = add_lora(self.student)
        self.parameters = [p for lora in self.loras.values() for p in (lora.down, lora.up)]
        self.average = [p.detach().clone() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.parameters, betas=(0.9, 0.98), weight_decay=0)
        self.lpips = LPIPS(folder.parent)
        self.trajectories = Trajectories(folder / "trajectories")
        self.steps, self.seconds, self.drawing = 0, 0.0, 0.0
        self.weight = torch.ones(CHANNELS, 1, 1)
        self.weight[codec.PIXEL_CHANNELS :] = PADDING_WEIGHT

    def start_rows(self) -> None:
        """Every row starts from the teacher's state; only the first few steps see these."""
        self.rows = [self.trajectories.next() for _ in range(STAGES)]
        self.x = torch.stack([self.trajectories.states[row][k].float() for k, row in enumerate(self.rows)])

    def rate(self) -> float:
        """Learning rate: warm up over 30 steps, hold, fall linearly over the last half of the time."""
        left = 1 - self.seconds / self.budget
        return RATE * min(1, (self.steps + 1) / 30) * min(1, max(0.02, left / 0.5))

    def step(self) -> tuple[Tensor, float]:
        """One update; the squared error of the velocity at each of the four steps, and the last one's LPIPS."""
        text, pooled = conditioning([self.trajectories.names[row] for row in self.rows])
        goal = torch.stack([self.trajectories.states[row][k + 1].float() for k, row in enumerate(self.rows)])
        now, then = STUDENT_SIGMAS[:-1], STUDENT_SIGMAS[1:]
        stride = (then - now).view(-1, 1, 1, 1)
        landed = self.x + stride * velocity(self.student, self.x, now, text, pooled)
        error = (((landed - goal) / stride).square() * self.weight).mean(dim=(1, 2, 3)) / self.weight.mean()
        seen, wanted = (codec.to_image(z[-1:]) for z in (landed, goal))
        perceived = self.lpips(seen, wanted.clamp(-1, 1)).mean()
        loss = (error * -stride.flatten()).sum() + LPIPS_WEIGHT * perceived
        loss.backward()
        self._update()
        self.rows = [self.trajectories.next(), *self.rows[:-1]]
        fresh = self.trajectories.states[self.rows[0]][:1].float()
        self.x = torch.cat([fresh, landed[:-1].detach()])
        return error.detach(), perceived.item()

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.param_groups[0]["lr"] = self.rate()
        self.adam.step()
        self.adam.zero_grad()
        self.steps += 1
        decay = min(0.99, self.steps / (self.steps + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    def save(self) -> None:
        state = {
            "parameters": [p.detach() for p in self.parameters],
            "average": self.average,
            "adam": self.adam.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
            "drawing": self.drawing,
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")

    def resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path)
            for mine, saved in zip(self.parameters, state["parameters"]):
                mine.data.copy_(saved)
            self.average = state["average"]
            self.adam.load_state_dict(state["adam"])
            self.steps, self.seconds, self.drawing = state["steps"], state["seconds"], state["drawing"]

    def export(self, path: Path) -> None:
        """The averaged LoRA, fp16, under the names that ComfyUI's loader knows for any model. Without an alpha it
        takes up @ down at the strength that the loader is given."""
        averaged = iter(self.average)
        weights = {}
        for name in self.loras:
            down, up = next(averaged), next(averaged)
            weights[f"diffusion_model.{name}.lora_down.weight"] = down.half().contiguous()
            weights[f"diffusion_model.{name}.lora_up.weight"] = up.half().contiguous()
        about = {"base": TEACHER_FILE.name, "steps": STAGES, "guidance": GUIDANCE, "updates": self.steps}
        save_file(weights, path, {"distillation": json.dumps(about)})

    def wants_trajectories(self) -> bool:
        if self.trajectories.shards < FIRST_SHARDS:
            return True
        in_time = self.seconds < DRAWING_ENDS * self.budget
        return in_time and self.drawing < DRAWING_SHARE * self.seconds

    def run(self) -> None:
        saved = last = time.monotonic()
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        while self.seconds < self.budget and not stopped:
            drew = self.wants_trajectories()
            if drew:
                self.trajectories.draw(self.teacher)
            else:
                if not hasattr(self, "x"):
                    self.start_rows()
                error, perceived = self.step()
                with open(self.folder / "log.csv", "a") as log:
                    shown = ",".join(f"{e:.5f}" for e in error.tolist())
                    known = len(self.trajectories.names)
                    log.write(f"{self.steps},{self.seconds:.0f},{known},{shown},{perceived:.4f}\n")
            now = time.monotonic()
            self.seconds += now - last
            self.drawing += (now - last) * drew
            last = now
            if now - saved > 120:
                self.save()
                saved = now
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=65, help="in all, over every resume")
    parser.add_argument("--folder", type=Path, default=WORKING)
    parser.add_argument("--export", type=Path, help="only write the LoRA of the last checkpoint, fp16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.seed()  # a resumed run must not see the trajectories in the same order again
    folder = options.folder / "distill"
    folder.mkdir(parents=True, exist_ok=True)
    distiller = Distiller(folder, options.minutes)
    distiller.resume()
    if options.export and not distiller.steps:
        parser.error("--export: there is no checkpoint to write; train first, or name --folder")
    if options.export:
        distiller.export(options.export)
    else:
        distiller.run()


if __name__ == "__main__":
    main()
