"""Latents as tokens, and unmerging in the space of clean estimates."""

from __future__ import annotations

import pytest
import torch
from comfyui_toma.toma_core.clean import grid_of, latent_of, tokens_of, unmerged
from comfyui_toma.toma_core.merge import reselect
from comfyui_toma.toma_core.tiles import Tiles
from hypothesis import given
from hypothesis import strategies as st

CASES = [
    ((2, 4, 8, 6), (1, 2, 2), (4, 3)),
    ((2, 4, 7, 5), (1, 2, 2), (4, 3)),
    ((1, 3, 1, 9), (1, 2, 2), (1, 5)),
    ((1, 128, 4, 4), (1, 1, 1), (4, 4)),
    ((2, 4, 3, 8, 6), (1, 2, 2), (12, 3)),
    ((1, 4, 5, 7, 5), (2, 2, 2), (12, 3)),
    ((1, 4, 1, 8, 6), (1, 2, 2), (4, 3)),
]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape,patch,grid", CASES)
def test_tokens_and_back(shape, patch, grid):
    latent = drawn(*shape)
    tokens = tokens_of(latent, patch)
    assert grid_of(shape, patch) == grid
    assert tokens.shape == (shape[0], grid[0] * grid[1], shape[1] * patch[0] * patch[1] * patch[2])
    assert torch.equal(latent_of(tokens, latent, patch), latent)


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(0, 4), st.integers(1, 9), st.integers(1, 9),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip
def test_any_latent_comes_back(batch, channels, frames, height, width, patch):
    shape = (batch, channels, *([frames] if frames else []), height, width)
    latent = drawn(*shape)
    patch = patch if frames else (1, *patch[1:])
    tokens = tokens_of(latent, patch)
    rows, columns = grid_of(shape, patch)
    assert tokens.shape[1] == rows * columns and torch.equal(latent_of(tokens, latent, patch), latent)


def test_a_token_is_the_patch_at_its_place():
    """Row by row, and a video's frames one after the other: the order of the blocks' own tokens."""
    video = drawn(1, 3, 2, 4, 6)
    tokens = tokens_of(video, (1, 2, 2)).unflatten(1, (2, 2, 3))
    assert torch.equal(tokens[0, 1, 1, 2], video[0, :, 1, 2:4, 4:6].flatten())


def test_odd_sides_are_padded_with_what_is_there():
    latent = drawn(1, 1, 3, 3)
    assert torch.equal(tokens_of(latent, (1, 2, 2))[0, 3], latent[0, 0, 2, 2].expand(4))


@pytest.fixture
def half():
    """32 of 64 tokens, and the clean estimates that they were picked by."""
    tiles, last = Tiles.of(8, 8, 4), drawn(2, 64, 12)
    return reselect(tiles.split(last), 32, tiles), last


def check_clean(half) -> None:
    """x0_i = last x0_i + U (x0_kept - last x0_kept), and of the kept ones what was computed."""
    merge, last = half
    now = drawn(2, 64, 12, seed=1)
    got = unmerged(now, last, merge)
    change = merge.take(now) - merge.take(last)
    u = merge.unmerge(torch.eye(32).expand(2, -1, -1))  # [2, 64, 32]
    assert torch.allclose(got, last + u @ change, atol=1e-5)
    assert torch.allclose(merge.take(got), merge.take(now), atol=1e-5)


def test_the_formula(half):
    check_clean(half)


def check_own_noise(half) -> None:
    """Two tokens that show the same thing and differ by noise alone: each velocity removes its own, though only one
    of them was computed. With x = x0 + sigma * noise and velocities (x - x0) / sigma, x - sigma * velocity is x0."""
    merge, last = half
    sigma, noise, moved = 0.7, drawn(2, 64, 12, seed=2), drawn(2, 1, 12, seed=3)
    x0 = last + moved  # all has moved alike since the last evaluation
    x = x0 + sigma * noise
    # What the network gives is right for the kept tokens; the others get copies of it.
    velocity_of_kept = merge.take((x - x0) / sigma)
    computed = x - sigma * merge.copied(velocity_of_kept)
    got = unmerged(computed, last, merge)
    assert torch.allclose((x - got) / sigma, noise, atol=1e-4)
    assert not torch.allclose((x - computed) / sigma, noise, atol=1e-1), "copied velocities are not right"


def test_each_token_keeps_its_own_noise(half):
    check_own_noise(half)


def test_nothing_merged_is_what_was_computed():
    tiles, last, now = Tiles.of(8, 8, 4), drawn(2, 64, 12), drawn(2, 64, 12, seed=1)
    assert torch.allclose(unmerged(now, last, reselect(tiles.split(last), 64, tiles)), now, atol=1e-6)
