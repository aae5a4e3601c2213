"""Can the demo models' pictures be told apart? python tests/training/retrieval.py flux|student|unet [--size 128]

Draws captions with ComfyUI's sampler and asks which of the 64 subjects, over the caption's colour, each
picture is nearest to by LPIPS. Writes the pictures as a sheet, drawn above, wanted below.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import networks  # noqa: F401 - finds ComfyUI and sets it up, so it comes first

# isort: split

import comfy.model_management
import comfy.sample
from data import Emoji
from demo_pack import loading
from lpips import LPIPS

comfy.model_management.in_training = False
WORKING = Path(__file__).resolve().parents[2] / ".dev" / "training"
LOADERS = {
    "flux": (loading.load_demo_flux, loading.FLUX_FILE),
    "student": (loading.load_demo_student, loading.STUDENT_FILE),  # meant for --steps 4 --cfg 1
    "unet": (loading.load_demo_unet, loading.UNET_FILE),
}


def draw(model, captions: list[str], size: int, steps: int, cfg: float, seed: int) -> Tensor:
    """Pictures [B, 3, size, size] in -1..1, one per caption, through the code that the KSampler node runs."""
    codec, pictures = loading.load_demo_codec(model), []
    for offset, caption in enumerate(captions):
        latent = comfy.sample.fix_empty_latent_channels(model, loading.empty_latent(size, size)["samples"])
        noise = comfy.sample.prepare_noise(latent, seed + offset)
        positive, negative = loading.encode_prompt(caption, size, size), loading.encode_prompt("", size, size)
        drawn = comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            seed=seed + offset,
            disable_pbar=True,
        )
        pictures.append(codec.decode(drawn))
    return torch.cat(pictures).movedim(-1, 1) * 2 - 1


def retrieve(data: Emoji, metric: LPIPS, picture: Tensor, colour: str) -> list[str]:
    """Subjects from the nearest to the farthest."""
    count, size = len(data.subjects), picture.shape[-1]
    known = data.compose(torch.arange(count), torch.full((count,), data.colours.index(colour)), size)
    distance = metric.distance(metric.features(picture[None]), metric.features(known))
    return [data.subjects[i] for i in distance.argsort()]


def sheet(drawn: Tensor, wanted: Tensor, path: Path) -> None:
    rows = torch.stack([drawn, wanted]).clamp(-1, 1)  # [2, B, 3, H, W]
    grid = rows.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    Image.fromarray(((grid + 1) * 127.5).round().byte().numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(LOADERS))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=2.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=WORKING)
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)

    load, default = LOADERS[options.kind]
    data, metric = Emoji(options.folder), LPIPS(options.folder)
    picks = random.Random(options.seed)
    subjects = picks.sample(data.subjects, options.count)
    colours = [picks.choice(data.colours) for _ in subjects]
    names = [f"{subject} on {colour}" for subject, colour in zip(subjects, colours)]
    drawn = draw(load(options.weights or default), names, options.size, options.steps, options.cfg, options.seed)
    found = [retrieve(data, metric, picture, colour) for picture, colour in zip(drawn, colours)]
    ranks = [order.index(subject) + 1 for order, subject in zip(found, subjects)]
    for name, order, rank in zip(names, found, ranks):
        print(f"{name:24} nearest {order[0]:12} rank {rank}")
    wanted = data.compose(
        torch.tensor([data.subjects.index(s) for s in subjects]),
        torch.tensor([data.colours.index(c) for c in colours]),
        options.size,
    )
    print(
        json.dumps(
            {
                "model": options.kind,
                "size": options.size,
                "right": sum(rank == 1 for rank in ranks),
                "of": len(ranks),
                "mean_rank": sum(ranks) / len(ranks),
                "mean_lpips": round(metric(drawn, wanted).mean().item(), 4),  # to the training image
            }
        )
    )
    sheet(drawn, wanted, options.sheet or options.folder / f"retrieval-{options.kind}-{options.size}.png")


if __name__ == "__main__":
    main()
