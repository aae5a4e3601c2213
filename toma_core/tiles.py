"""A token grid of any height and width as equal batches of tiles, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """How the N = height * width tokens of an image lie in `count` tiles of `size` tokens.

    Where the sides are multiples of the tile, tiles are squares and splitting is a rearrangement.
    Any other grid is walked along a snake of bands about `tile` rows high, and the walk is cut into
    runs that differ by one token at most: still compact, still one batch, at most one padding token
    a tile.
    """

    height: int
    width: int
    tile: int
    count: int
    square: bool

    @classmethod
    def of(cls, height: int, width: int, tile: int) -> Tiles:
        """Tile 0 is the whole image."""
        return _tiles(height, width, tile)

    @property
    def tokens(self) -> int:
        return self.height * self.width

    @property
    def size(self) -> int:
        return -(-self.tokens // self.count)

    @property
    def padded(self) -> bool:
        return self.tokens < self.count * self.size

    @property
    def real(self) -> Tensor | None:
        """Which places hold a token, bool [T, n]; None if all of them do."""
        return self.real_on(torch.device("cpu"))

    def real_on(self, device: torch.device) -> Tensor | None:
        return _real(self, device) if self.padded else None

    def order(self, device: torch.device) -> Tensor:
        """The token of the grid at each place, [T * n]."""
        return _order(self, device)

    def place(self, device: torch.device) -> Tensor:
        """The place of each token of the grid, [N]: the inverse of `order`."""
        return _place(self, device)

    def split(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, T, n, C]; padding repeats a token of its tile."""
        if self.count == 1:
            return x.unsqueeze(1)
        if self.square:
            side, across = self.tile, self.width // self.tile
            return rearrange(x, "b (th p tw q) c -> b (th tw) (p q) c", p=side, q=side, tw=across)
        return x.index_select(1, self.order(x.device)).unflatten(1, (self.count, self.size))

    def join(self, tiles: Tensor) -> Tensor:
        """[B, T, n, C] -> [B, N, C], the inverse of `split`."""
        if self.count == 1:
            return tiles.squeeze(1)
        if self.square:
            side, across = self.tile, self.width // self.tile
            return rearrange(tiles, "b (th tw) (p q) c -> b (th p tw q) c", p=side, tw=across)
        return tiles.flatten(1, 2).index_select(1, self.place(tiles.device))

    def add(self, x: Tensor, tiles: Tensor) -> Tensor:
        """x [B, N, C] + join(tiles), which spares a copy where tiles are squares."""
        if not self.square:
            return x + self.join(tiles)
        side, across = self.tile, self.width // self.tile
        grid = rearrange(tiles, "b (th tw) (p q) c -> b th p tw q c", p=side, tw=across)
        return (x.reshape(grid.shape) + grid).reshape(x.shape)


@torch.compiler.assume_constant_result
@lru_cache(maxsize=128)
def _tiles(height: int, width: int, tile: int) -> Tiles:
    count = max(1, round(height * width / tile**2)) if tile else 1
    square = count > 1 and height % tile == width % tile == 0
    return Tiles(height, width, tile, count, square)


@torch.compiler.assume_constant_result
@lru_cache(maxsize=128)
def _order(tiles: Tiles, device: torch.device) -> Tensor:
    tokens = torch.arange(tiles.tokens)
    if tiles.count == 1 or tiles.square:
        return tiles.split(tokens[None, :, None]).flatten().to(device)
    places = [torch.arange(a, a + tiles.size).clamp(max=b - 1) for a, b in pairwise(_cuts(tiles))]
    return _snake(tiles)[torch.cat(places)].to(device)


@torch.compiler.assume_constant_result
@lru_cache(maxsize=128)
def _place(tiles: Tiles, device: torch.device) -> Tensor:
    order = tiles.order(torch.device("cpu"))
    places = torch.arange(len(order))
    real = tiles.real
    if real is not None:
        order, places = order[real.flatten()], places[real.flatten()]
    return places[order.argsort()].to(device)


@torch.compiler.assume_constant_result
@lru_cache(maxsize=128)
def _real(tiles: Tiles, device: torch.device) -> Tensor:
    held = torch.tensor(_cuts(tiles)).diff()
    return (torch.arange(tiles.size) < held.unsqueeze(1)).to(device)


def _cuts(tiles: Tiles) -> list[int]:
    """Where the tiles begin on the walk, and its end."""
    return [t * tiles.tokens // tiles.count for t in range(tiles.count + 1)]


def _snake(tiles: Tiles) -> Tensor:
    """The tokens [N] along a walk: band by band from the top, there and back, column by column inside a band."""
    grid = torch.arange(tiles.tokens).view(tiles.height, tiles.width)
    bands = grid.tensor_split(max(1, round(tiles.height / tiles.tile)))
    return torch.cat([(band if turn % 2 == 0 else band.flip(1)).T.flatten() for turn, band in enumerate(bands)])
