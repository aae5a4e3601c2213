"""What the chunks of a batch keep from call to call.

ComfyUI evaluates the prompts of a run in one batch or one by one, and regroups them as memory allows. So what is kept
belongs to a chunk, and a call gathers it in the order of its own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .merge import Merge


@dataclass
class ChunkState:
    """What a batch of `chunks` equal parts keeps: its merges by name, and the steps at which their destinations were
    selected and their weights computed, counted in merged steps; on a DiT also its last clean estimate."""

    chunks: int
    selected_at: int = -1
    weighed_at: int = -1
    merges: dict[str, Merge] = field(default_factory=dict)
    clean: Tensor | None = None  # [B, N, c] tokens of x0
    used_at: int = 0  # the number of the guider's answer that used it last

    @classmethod
    def gather(cls, parts: Sequence[tuple[ChunkState, int]]) -> ChunkState:
        """One batch from the chunks (state, slot) of others."""
        whole = parts[0][0]
        if len(parts) == whole.chunks and all(p[0] is whole and p[1] == i for i, p in enumerate(parts)):
            return cls(whole.chunks, whole.selected_at, whole.weighed_at, dict(whole.merges), whole.clean)
        names = [name for name in whole.merges if all(name in state.merges for state, _ in parts)]
        cleans = [_rows(state.clean, state.chunks, slot) for state, slot in parts if state.clean is not None]
        return cls(
            len(parts),
            min(state.selected_at for state, _ in parts),
            min(state.weighed_at for state, _ in parts),
            {name: Merge.cat([_images(k.merges[name], k.chunks, slot) for k, slot in parts]) for name in names},
            torch.cat(cleans) if len(cleans) == len(parts) else None,
        )


def _rows(x: Tensor, chunks: int, slot: int) -> Tensor:
    return x[slot * len(x) // chunks : (slot + 1) * len(x) // chunks]


def _images(merge: Merge, chunks: int, slot: int) -> Merge:
    size = len(merge.kept)
    return merge.images(slot * size // chunks, (slot + 1) * size // chunks)
