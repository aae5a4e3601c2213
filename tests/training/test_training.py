"""What the demo models' training stands on, without training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_pack import captions, codec
from downloads import fetched
from muon import orthogonalise


@pytest.mark.parametrize("shape", [(64, 128), (64, 320)])
def test_orthogonalise_draws_singular_values_to_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.5 and values.max() < 1.3


def test_codec_is_exact():
    image = torch.rand(2, 3, 32, 48) * 2 - 1
    for channels in (12, 16):
        assert torch.equal(codec.to_image(codec.to_latent(image, channels)), image)


def test_vectors_are_the_same_on_every_machine():
    text, pooled = captions.encode("fox on blue", 128, 32)
    assert text.shape == (12, 256) and pooled.shape == (256,)
    assert text[0, :8].tolist() == [-1, -1, 1, 1, 1, -1, 1, -1]
    assert captions.encode("", 128, 32)[0].abs().sum() == 0


def test_subjects_are_far_apart():
    pooled = torch.stack(
        [captions.encode(f"{s} on red", 128, 32)[1][: captions.SUBJECT_DIM] for s in captions.SUBJECTS]
    )
    overlap = (pooled @ pooled.T / captions.SUBJECT_DIM - torch.eye(len(pooled))).abs().max()
    assert len(pooled) == 64 and overlap < 0.4


@pytest.mark.parametrize("caption", ["dragon on blue", "fox", "fox cat on blue", "fox on blue on red"])
def test_wrong_captions_say_what_would_be_right(caption):
    with pytest.raises(ValueError, match="fox on blue.*Subjects: .*Colours: "):
        captions.encode(caption, 128, 32)


def test_a_download_that_fails_leaves_nothing(tmp_path):
    """And a file is not seen before it is whole: a second process would read half of it."""
    write = "import pathlib, sys; pathlib.Path('data-1.tgz').write_text('whole'); "
    look = f"assert not list(pathlib.Path({str(tmp_path)!r}).glob('data-*')); "
    with pytest.raises(subprocess.CalledProcessError):
        fetched(tmp_path, "data-*.tgz", [sys.executable, "-c", write + "sys.exit(1)"])
    assert not list(tmp_path.iterdir())
    got = fetched(tmp_path, "data-*.tgz", [sys.executable, "-c", write + look])
    assert got == tmp_path / "data-1.tgz" and got.read_text() == "whole"
    assert fetched(tmp_path, "data-*.tgz", ["no such command"]) == got, "it is there"
