"""What was picked and where forecasts were wrong, drawn on the image. Images are [H, W, 3] in 0..1; so is what comes
back."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

DOT = (1.0, 0.824, 0.247)
# From few to many: dark blue, purple, orange, light yellow. Readable without colour vision.
SCALE = ((13, 8, 135), (126, 3, 168), (204, 71, 120), (248, 149, 64), (240, 249, 33))


def kept_tokens(image: Tensor, grid: tuple[int, int], kept: Tensor) -> Tensor:
    """A dot for each kept token [K] on the darkened image."""
    token, y, x, cell = _cells(image, grid)
    is_kept = torch.zeros(grid[0] * grid[1], dtype=torch.bool)
    is_kept[kept.long().cpu()] = True
    from_centre = torch.hypot(y[:, None], x[None])
    radius = max(0.3 * cell, 0.6)
    rim, dot = (((r + 0.5 - from_centre).clamp(0, 1) * is_kept[token])[..., None] for r in (radius * 1.4, radius))
    dark = _rgb(image) * 0.45
    return torch.lerp(dark * (1 - 0.75 * rim), torch.tensor(DOT), dot)


def regions(image: Tensor, grid: tuple[int, int], assignment: Tensor) -> Tensor:
    """Each group of merged tokens in its mean colour, outlined; assignment [N] is the group of each token."""
    image, (token, *_) = _rgb(image), _cells(image, grid)
    group = assignment.long().cpu()[token]
    count = int(assignment.max()) + 1
    total = torch.zeros(count, 3).index_add_(0, group.flatten(), image.reshape(-1, 3))
    mean = total / group.flatten().bincount(minlength=count).clamp(min=1)[:, None]
    return _outlined(mean[group], image, grid, assignment, 0.8)


def density(image: Tensor, grid: tuple[int, int], assignment: Tensor, sizes: Tensor | None = None) -> Tensor:
    """How many tokens each kept one stands for, as a colour, with a legend. `sizes` [K] are given where `assignment`
    [N] is that of one frame only."""
    assignment = assignment.long().cpu()
    sizes = assignment.bincount() if sizes is None else sizes.cpu()
    most = int(sizes.max())
    token, *_ = _cells(image, grid)
    colours = _colour((sizes[assignment] - 1) / max(1, most - 1))[token]
    grey = _rgb(image).mean(-1, keepdim=True)
    drawn = _outlined(colours * (0.7 + 0.3 * grey), image, grid, assignment, 0.35)
    return _with_legend(drawn, "tokens per kept token", "1", str(most))


def forecast_error(image: Tensor, error: Tensor, most: float) -> Tensor:
    """Where a forecast was wrong: error [h, w] from 0 to `most` as a colour over the grey image, with a legend."""
    rows, columns = error.shape
    token, *_ = _cells(image, (rows, columns))
    share = (error.float().cpu() / max(most, 1e-20)).clamp(0, 1).flatten()[token]
    grey = _rgb(image).mean(-1, keepdim=True).expand(-1, -1, 3) * 0.45
    drawn = torch.lerp(grey, _colour(share), (0.12 + 0.88 * share)[..., None])
    return _with_legend(drawn, "error of the forecast", "0", f"{most:.0%}" if most >= 0.1 else f"{most:.1%}")


def _rgb(image: Tensor) -> Tensor:
    return image[..., :3].float().cpu()


def _cells(image: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, float]:
    """Of each pixel: its token [H, W] and how far it is from the middle of the token, y [H] and x [W], in
    pixels; and the smaller side of a token."""
    (height, width), (rows, columns) = image.shape[:2], grid
    y = (torch.arange(height) + 0.5) * rows / height
    x = (torch.arange(width) + 0.5) * columns / width
    token = y.long()[:, None] * columns + x.long()
    tall, wide = height / rows, width / columns
    return token, (y % 1 - 0.5) * tall, (x % 1 - 0.5) * wide, min(tall, wide)


def _outlined(drawn: Tensor, image: Tensor, grid: tuple[int, int], assignment: Tensor, strength: float) -> Tensor:
    """With a line where the groups of neighbouring tokens differ, white or, on white, black; fainter where
    tokens are small."""
    token, y, x, cell = _cells(image, grid)
    groups = torch.nn.functional.pad(assignment.float().cpu().view(1, *grid), (1, 1, 1, 1), mode="replicate")[0]
    here = groups[1:-1, 1:-1]
    half_line = max(0.5, cell / 24)
    line = torch.zeros(token.shape)
    for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
        there = groups[1 + down : 1 + down + grid[0], 1 + right : 1 + right + grid[1]]
        differs = (there != here).flatten()[token]
        to_border = torch.zeros(token.shape)
        if down:
            to_border = to_border.maximum((image.shape[0] / grid[0] / 2 - down * y)[:, None])
        if right:
            to_border = to_border.maximum((image.shape[1] / grid[1] / 2 - right * x)[None])
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


def _with_legend(drawn: Tensor, title: str, low: str, high: str) -> Tensor:
    """The scale and what it means, in the lower left corner, if the image has room for it."""
    height, width, _ = drawn.shape
    size = max(10, min(height, width) // 36)
    font = ImageFont.load_default(size)
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
