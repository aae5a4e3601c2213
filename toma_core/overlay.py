"""What was picked, drawn on the picture. Pictures are [H, W, 3] in 0..1; so is what comes back."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

DOT = (1.0, 0.824, 0.247)
# From few to many: dark blue, purple, orange, light yellow. Readable without colour vision.
SCALE = ((13, 8, 135), (126, 3, 168), (204, 71, 120), (248, 149, 64), (240, 249, 33))


def kept_tokens(picture: Tensor, grid: tuple[int, int], kept: Tensor) -> Tensor:
    """A dot for each kept token [K] on the darkened picture."""
    token, y, x, cell = _cells(picture, grid)
    is_kept = torch.zeros(grid[0] * grid[1], dtype=torch.bool)
    is_kept[kept.long().cpu()] = True
    from_centre = torch.hypot(y[:, None], x[None])
    radius = max(0.3 * cell, 0.6)
    rim, dot = (((r + 0.5 - from_centre).clamp(0, 1) * is_kept[token])[..., None] for r in (radius * 1.4, radius))
    dark = _rgb(picture) * 0.45
    return torch.lerp(dark * (1 - 0.75 * rim), torch.tensor(DOT), dot)


def regions(picture: Tensor, grid: tuple[int, int], assignment: Tensor) -> Tensor:
    """Each group of merged tokens in its mean colour, outlined; assignment [N] is the group of each token."""
    picture, (token, *_) = _rgb(picture), _cells(picture, grid)
    group = assignment.long().cpu()[token]
    count = int(assignment.max()) + 1
    total = torch.zeros(count, 3).index_add_(0, group.flatten(), picture.reshape(-1, 3))
    mean = total / group.flatten().bincount(minlength=count).clamp(min=1)[:, None]
    return _outlined(mean[group], picture, grid, assignment, 0.8)


def density(picture: Tensor, grid: tuple[int, int], assignment: Tensor) -> Tensor:
    """How many tokens each kept one stands for, as a colour, with a legend."""
    assignment = assignment.long().cpu()
    sizes = assignment.bincount()
    most = int(sizes.max())
    token, *_ = _cells(picture, grid)
    colours = _colour((sizes[assignment] - 1) / max(1, most - 1))[token]
    grey = _rgb(picture).mean(-1, keepdim=True)
    drawn = _outlined(colours * (0.7 + 0.3 * grey), picture, grid, assignment, 0.35)
    return _with_legend(drawn, most)


def _rgb(picture: Tensor) -> Tensor:
    return picture[..., :3].float().cpu()


def _cells(picture: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, float]:
    """Of each pixel: its token [H, W] and how far it is from the middle of the token, y [H] and x [W], in
    pixels; and the smaller side of a token."""
    (height, width), (rows, columns) = picture.shape[:2], grid
    y = (torch.arange(height) + 0.5) * rows / height
    x = (torch.arange(width) + 0.5) * columns / width
    token = y.long()[:, None] * columns + x.long()
    tall, wide = height / rows, width / columns
    return token, (y % 1 - 0.5) * tall, (x % 1 - 0.5) * wide, min(tall, wide)


def _outlined(drawn: Tensor, picture: Tensor, grid: tuple[int, int], assignment: Tensor, strength: float) -> Tensor:
    """With a line where the groups of neighbouring tokens differ, white or, on white, black; fainter where
    tokens are small."""
    token, y, x, cell = _cells(picture, grid)
    groups = torch.nn.functional.pad(assignment.float().cpu().view(1, *grid), (1, 1, 1, 1), mode="replicate")[0]
    here = groups[1:-1, 1:-1]
    half_line = max(0.5, cell / 24)
    line = torch.zeros(token.shape)
    for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
        there = groups[1 + down : 1 + down + grid[0], 1 + right : 1 + right + grid[1]]
        differs = (there != here).flatten()[token]
        to_border = torch.zeros(token.shape)
        if down:
            to_border = to_border.maximum((picture.shape[0] / grid[0] / 2 - down * y)[:, None])
        if right:
            to_border = to_border.maximum((picture.shape[1] / grid[1] / 2 - right * x)[None])
        line = line.maximum((half_line + 0.5 - to_border).clamp(0, 1) * differs)
    strength = strength * min(1.0, max(0.0, (cell - 2) / 8))
    ink = (drawn.mean(-1, keepdim=True) < 0.75).float().expand_as(drawn)
    return torch.lerp(drawn, ink, (line * strength)[..., None])


def _colour(share: Tensor) -> Tensor:
    """The colour [..., 3] of shares in 0..1 on the scale."""
    scale = torch.tensor(SCALE) / 255
    at = share.clamp(0, 1) * (len(SCALE) - 1)
    low = at.long().clamp(max=len(SCALE) - 2)
    return torch.lerp(scale[low], scale[low + 1], (at - low)[..., None])


def _with_legend(drawn: Tensor, most: int) -> Tensor:
    """The scale and what it means, in the lower left corner, if the picture has room for it."""
    height, width, _ = drawn.shape
    size = max(10, min(height, width) // 36)
    font = ImageFont.load_default(size)
    title, low, high = "tokens per kept token", "1", str(most)
    bar, gap = round(font.getlength(title)), size // 2
    box_width, box_height = bar + 2 * gap, 3 * size + 4 * gap
    if box_width + 2 * gap > width or box_height + 2 * gap > height:
        return drawn
    legend = Image.new("RGB", (box_width, box_height), (20, 22, 26))
    draw = ImageDraw.Draw(legend)
    draw.text((gap, gap), title, "white", font, anchor="lt")
    draw.text((gap, box_height - gap), low, "white", font, anchor="lb")
    draw.text((box_width - gap, box_height - gap), high, "white", font, anchor="rb")
    pixels = torch.frombuffer(bytearray(legend.tobytes()), dtype=torch.uint8).view(box_height, box_width, 3) / 255
    pixels[2 * gap + size : 2 * gap + 2 * size, gap : gap + bar] = _colour(torch.linspace(0, 1, bar))
    drawn = drawn.clone()
    drawn[height - gap - box_height : height - gap, gap : gap + box_width] = pixels
    return drawn
