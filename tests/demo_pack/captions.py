"""Captions such as "fox on blue" as conditioning: no tokenizer, no weights, nothing to download."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

# fmt: off
# Word -> code points of the emoji that the demo models were trained on.
SUBJECTS: dict[str, str] = {
    "apple": "1f34e", "tangerine": "1f34a", "lemon": "1f34b", "banana": "1f34c",
    "watermelon": "1f349", "grapes": "1f347", "strawberry": "1f353", "cherries": "1f352",
    "pineapple": "1f34d", "peach": "1f351", "pear": "1f350", "avocado": "1f951",
    "carrot": "1f955", "corn": "1f33d", "eggplant": "1f346", "mushroom": "1f344",
    "bread": "1f35e", "cheese": "1f9c0", "egg": "1f373", "pizza": "1f355",
    "burger": "1f354", "donut": "1f369", "cookie": "1f36a", "icecream": "1f366",
    "cat": "1f431", "dog": "1f436", "fox": "1f98a", "bear": "1f43b",
    "panda": "1f43c", "koala": "1f428", "lion": "1f981", "cow": "1f42e",
    "pig": "1f437", "frog": "1f438", "monkey": "1f435", "chicken": "1f414",
    "penguin": "1f427", "owl": "1f989", "mouse": "1f42d", "rabbit": "1f430",
    "octopus": "1f419", "crab": "1f980", "ladybug": "1f41e", "butterfly": "1f98b",
    "smile": "1f600", "pumpkin": "1f383", "ghost": "1f47b", "robot": "1f916",
    "alien": "1f47d", "star": "2b50", "sun": "1f31e", "moon": "1f319",
    "heart": "2764-fe0f", "rose": "1f339", "sunflower": "1f33b", "cactus": "1f335",
    "balloon": "1f388", "gift": "1f381", "bell": "1f514", "car": "1f697",
    "rocket": "1f680", "football": "26bd", "basketball": "1f3c0", "crown": "1f451",
}

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (240, 240, 240), "black": (35, 35, 40), "red": (200, 60, 60),
    "blue": (60, 95, 200), "green": (60, 150, 85), "yellow": (240, 205, 75),
    "purple": (125, 75, 175), "teal": (70, 180, 185),
}
# fmt: on

VECTORS_PER_WORD = 4
WORDS = 3
CONTEXT_DIM = 256
SUBJECT_DIM, COLOUR_DIM, SIZE_DIM = 192, 32, 32
POOLED_DIM = SUBJECT_DIM + COLOUR_DIM + SIZE_DIM


def _signs(text: str, dim: int) -> Tensor:
    """A fixed vector of +-1, [dim]: the bits of a hash are the same on every platform."""
    digest = hashlib.sha256(text.encode()).digest()
    bits = [byte >> bit & 1 for byte in digest for bit in range(8)]
    return torch.tensor(bits[:dim], dtype=torch.float32) * 2 - 1


def _size_vector(pixels: float, tokens: float) -> Tensor:
    """Picture size and token grid size as waves of their logarithms, [SIZE_DIM]."""
    waves = torch.arange(1, SIZE_DIM // 4 + 1) * (math.pi / 4)
    angles = torch.cat([waves * math.log2(pixels / 32), waves * math.log2(tokens / 8)])
    return torch.cat([angles.sin(), angles.cos()])


def parse(caption: str) -> tuple[str, str] | None:
    """("fox", "blue") from "fox on blue"; None from an empty caption (the negative prompt)."""
    words = caption.lower().replace(",", " ").split()
    if not words:
        return None
    subjects = [word for word in words if word in SUBJECTS]
    colours = [word for word in words if word in COLOURS]
    unknown = [word for word in words if word not in (*SUBJECTS, *COLOURS, "a", "an", "on")]
    if unknown or len(subjects) != 1 or len(colours) != 1:
        wrong = f"unknown: {', '.join(unknown)}" if unknown else "it needs one subject and one colour"
        raise ValueError(
            f'The demo models cannot draw "{caption}" ({wrong}). '
            'Write "<subject> on <colour>", such as "fox on blue". '
            f"Subjects: {', '.join(sorted(SUBJECTS))}. Colours: {', '.join(COLOURS)}."
        )
    return subjects[0], colours[0]


def encode(caption: str, pixels: float, tokens: float) -> tuple[Tensor, Tensor]:
    """Text [WORDS * VECTORS_PER_WORD, CONTEXT_DIM] and pooled vector [POOLED_DIM] for one caption.

    `pixels` and `tokens` are the side of the picture and of the token grid that positions run over. They
    differ only in training, where small pictures are spread over the grid of a large one.
    """
    size = _size_vector(pixels, tokens)
    pair = parse(caption)
    if pair is None:
        nothing = torch.zeros(SUBJECT_DIM + COLOUR_DIM)
        return torch.zeros(WORDS * VECTORS_PER_WORD, CONTEXT_DIM), torch.cat([nothing, size])
    subject, colour = pair
    words = [_signs(f"{word}/{i}", CONTEXT_DIM) for word in (subject, "on", colour) for i in range(VECTORS_PER_WORD)]
    pooled = torch.cat([_signs(subject, SUBJECT_DIM), _signs(colour, COLOUR_DIM), size])
    return torch.stack(words), pooled
