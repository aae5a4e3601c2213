"""What becomes of the arguments of a block whose image tokens are merged."""

from dataclasses import replace

import pytest
import torch
from comfyui_toma.toma_core.clean import grid_of, tokens_of
from comfyui_toma.toma_core.evaluation import Unmergeable
from comfyui_toma.toma_core.merge import reselect
from comfyui_toma.toma_core.patcher.families.entry import Stream
from comfyui_toma.toma_core.patcher.families.rows import Cut, joined
from comfyui_toma.toma_core.selection import keep_count
from comfyui_toma.toma_core.settings import PRESETS
from comfyui_toma.toma_core.tiles import Tiles

N, TEXT, REST = 16, 3, 5
STREAM = Stream("blocks", rows={"pe": 1, "wide": 2}, masks=("mask",), per_frame={"e": 3})


@pytest.fixture
def merge():
    tiles = Tiles.of(4, 4, 4)
    return reselect(tiles.split(torch.randn(2, N, 6, generator=torch.Generator().manual_seed(0))), 7, tiles)


def rows_left(merge, before: int, after: int) -> torch.Tensor:
    """[start, ...] of each image of the batch, by hand."""
    return torch.stack(
        [torch.tensor([*range(before), *(kept + before).tolist(), *range(before + N, before + N + after)])
         for kept in merge.kept]
    )  # fmt: skip


def test_text_before_the_image_or_behind_it(merge):
    cut = Cut(merge, 0, N + REST)
    value = torch.arange(TEXT + N + REST).float()[None, :, None].expand(2, -1, 4)
    assert torch.equal(cut.argument(STREAM, "pe", value)[:, :, 0], rows_left(merge, TEXT, REST).float())
    behind = Stream("blocks", rows={"pe": 1}, text_first=False)
    assert torch.equal(cut.argument(behind, "pe", value)[:, :, 0], rows_left(merge, 0, TEXT + REST).float())


def test_one_for_all_images_one_for_all_tokens_and_tuples(merge):
    cut = Cut(merge, TEXT, TEXT + N)
    value = torch.randn(1, 1, TEXT + N, 2, 2)
    taken = cut.argument(STREAM, "wide", value)
    assert taken.shape == (2, 1, TEXT + 7, 2, 2)
    assert all(torch.equal(taken[i, 0], value[0, 0, rows]) for i, rows in enumerate(rows_left(merge, TEXT, 0)))
    *both, split = cut.argument(STREAM, "wide", (value, value, True))
    assert all(torch.equal(part, taken) for part in both) and split is True
    same = torch.randn(2, 1, 6)
    assert cut.argument(STREAM, "pe", same) is same
    with pytest.raises(Unmergeable, match="pe of blocks has 5 rows"):
        cut.argument(STREAM, "pe", torch.randn(2, 5, 6))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 1, 1), (2,)], ids=str)
def test_masks(merge, shape):
    """[L, L] or [1, L], with or without a batch and heads."""
    cut, length = Cut(merge, 0, N), TEXT + N
    rows = rows_left(merge, TEXT, 0)
    square = torch.randn(*shape[:-1], length, length)
    taken = cut.argument(STREAM, "mask", square)
    assert taken.shape[-2:] == (TEXT + 7, TEXT + 7) and len(taken) == 2
    for i, left in enumerate(rows):
        whole = square if square.ndim == 2 else square[min(i, len(square) - 1)]
        assert torch.equal(taken[i], whole[..., left, :][..., left])
    line = torch.randn(2, 1, length)
    assert torch.equal(cut.argument(STREAM, "mask", line)[1], line[1][:, rows[1]])


def test_rows_of_frames(merge):
    """Of 4 frames with 4 tokens each; what is not divisible is rounded up, as ComfyUI repeats them."""
    frames = torch.arange(4).float()[None, :, None].expand(2, -1, 6)
    taken = Cut(merge, 0, N).argument(STREAM, "e", frames)
    assert torch.equal(taken[..., 0], (merge.kept // 4).float())
    assert torch.equal(Cut(merge, 0, N).argument(STREAM, "e", frames[:, :3])[..., 0], (merge.kept // 6).float())


def test_places_in_the_sequence(merge):
    cut = Cut(merge, TEXT, TEXT + N + REST)
    gone, end = N - 7, TEXT + N
    assert [cut.bound(place) for place in (None, 0, TEXT)] == [None, 0, TEXT]
    assert [cut.bound(place) for place in (end, end + REST)] == [end - gone, end + REST - gone]
    assert cut.bound([(0, TEXT, 1), (TEXT, None, 0)]) == [(0, TEXT, 1), (TEXT, None, 0)]


def test_taken_and_put_back(merge):
    cut, sequence = Cut(merge, TEXT, TEXT + N + REST), torch.randn(2, TEXT + N + REST, 6)
    image = sequence[:, TEXT : TEXT + N]
    short = cut.tokens(sequence, merge.take(image), N)
    assert short.shape[1] == TEXT + 7 + REST and torch.equal(short[:, TEXT : TEXT + 7], merge.take(image))
    assert torch.equal(joined(short, image, TEXT, 7), sequence)


def bytes_of(*holders: object) -> int:
    """Of all tensors that these objects hold, each counted once."""
    found: dict[int, int] = {}

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        elif hasattr(value, "__dict__"):
            for part in vars(value).values():
                walk(part)

    for holder in holders:
        walk(holder)
    return sum(found.values())


def test_memory_of_a_video():
    """Wan 14B, 480p, 81 frames, prompt and negative prompt: what is kept from step to step, on the meta device."""
    latent, patch = torch.empty(2, 16, 21, 60, 104, device="meta"), (1, 2, 2)
    settings = replace(PRESETS["balanced"]["dit"], ratio=0.35)
    clean = tokens_of(latent, patch)
    tiles = Tiles.of(*grid_of(tuple(latent.shape), patch), settings.tile_size)
    assert clean.shape == (2, 32760, 64)
    merge = reselect(tiles.split(clean), keep_count(tiles.tokens, settings.ratio), tiles, budget=settings.budget)
    activation = 2 * 32760 * 5120 * 2  # of one layer
    assert bytes_of(merge) + clean.nbytes < 0.08 * activation
    pe = torch.empty(1, 32760, 1, 64, 2, 2, device="meta")
    taken = Cut(merge, 0, 32760).argument(Stream("blocks", rows={"pe": 1}), "pe", pe)
    assert taken.shape[1] == merge.kept.shape[1] and taken.nbytes < 0.1 * activation
