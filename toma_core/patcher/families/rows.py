"""A sequence of tokens whose image is merged: what becomes of the arguments that have a row for each token."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ...evaluation import Evaluation, Unmergeable
from ...merge import Merge
from .entry import Stream


@dataclass(frozen=True)
class Cut:
    """A sequence of `full` tokens with N image tokens from `start` on, of which the merge keeps K: L' = full - N + K
    are left. What comes before the image and what follows it stays."""

    merge: Merge
    start: int
    full: int

    @property
    def image(self) -> int:
        return self.merge.tiles.tokens

    @property
    def keep(self) -> int:
        return self.merge.kept.shape[1]

    def tokens(self, sequence: Tensor, kept: Tensor, now: int) -> Tensor:
        """[B, L', C]: the kept tokens [B, K, C] in the place of the `now` tokens of the image in the sequence."""
        if sequence.shape[1] == now:
            return kept
        return torch.cat((sequence[:, : self.start], kept, sequence[:, self.start + now :]), 1)

    def argument(self, stream: Stream, name: str, value: Tensor | tuple) -> Tensor | tuple:
        """An argument of a block, for the tokens that are left; of a tuple (LTX) all its tensors."""
        if isinstance(value, tuple):
            return tuple(self.argument(stream, name, part) if isinstance(part, Tensor) else part for part in value)
        if name in stream.per_frame:
            each = ceil(self.full / value.shape[1])
            return _take(value, self._rows(self.full, 0).div(each, rounding_mode="floor"), 1)
        if name in stream.masks:
            value = value.unsqueeze(0) if value.ndim == 2 else value
            dims = [dim for dim in (value.ndim - 2, value.ndim - 1) if value.shape[dim] == value.shape[-1]]
        else:
            dims = [stream.rows[name]]
        length = value.shape[dims[-1]]
        if length == 1 < self.full:
            return value  # one row for all tokens
        if length < self.full:
            raise Unmergeable(f"{name} of {stream.blocks} has {length} rows for {self.full} tokens")
        rows = self._rows(length, length - self.full if stream.text_first else 0)
        for dim in dims:
            value = _take(value, rows, dim)
        return value

    def bound(self, value: Any) -> Any:
        """Places in the sequence, moved as far as the tokens before them have become fewer."""
        if value is None:
            return None
        if isinstance(value, int):
            return value - (self.image - self.keep) if value >= self.start + self.image else value
        return [(self.bound(begin), self.bound(end), *rest) for begin, end, *rest in value]

    def _rows(self, length: int, ahead: int) -> Tensor:
        """[B, length - N + K] the rows that are left of `length` ones, `ahead` of which come before the sequence."""
        kept, start = self.merge.kept, self.start + ahead
        before = torch.arange(start, device=kept.device).expand(len(kept), -1)
        after = torch.arange(start + self.image, length, device=kept.device).expand(len(kept), -1)
        return torch.cat((before, kept + start, after), 1)


def argument_for(stream: Stream, evaluation: Evaluation, name: str, value: Tensor | tuple, cut: Cut) -> Tensor | tuple:
    """An argument for the tokens that are left, made once for all blocks of a call that get the same one."""
    known = evaluation.scratch.get((stream.blocks, name))
    source = value[0] if isinstance(value, tuple) else value
    if known is None or known[0] is not source or known[1] is not cut.merge:
        known = (source, cut.merge, cut.argument(stream, name, value))
        evaluation.scratch[stream.blocks, name] = known
    return known[2]


def _take(value: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Along `dim` the rows [B, L'] of each image; a value that is the same for all images is taken for each."""
    value = value.expand(len(rows), *value.shape[1:])
    return torch.stack([part.index_select(dim - 1, index) for part, index in zip(value, rows)])


def joined(sequence: Tensor, image: Tensor, start: int, keep: int) -> Tensor:
    """The sequence with all image tokens [B, N, C] in the place of the kept ones."""
    if sequence.shape[1] == keep:
        return image
    return torch.cat((sequence[:, :start], image, sequence[:, start + keep :]), 1)
