"""Our own work around blocks: outside of torch.compile's graphs, and where it finds no memory the call runs in full."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from ..evaluation import Unmergeable
from .dynamo import uncompiled

OUT_OF_MEMORY = "merging ran out of memory"
# MPS, the CPU on Linux and on Windows, and MPS for a single tensor that is too large: plain RuntimeErrors.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")


def raise_unless_out_of_memory(error: RuntimeError) -> None:
    """Raises the error again if it is about anything but memory."""
    is_oom = getattr(sys.modules.get("comfy.model_management"), "is_oom", None)  # not in 0.16
    if isinstance(error, torch.cuda.OutOfMemoryError) or (is_oom and is_oom(error)):
        return
    if not any(words in str(error).lower() for words in _WORDS):
        raise error


def guarded(work: Callable, *args):
    """work(*args), not compiled; out of memory it raises Unmergeable."""
    try:
        return uncompiled(work, *args)
    except RuntimeError as error:
        raise_unless_out_of_memory(error)
    raise Unmergeable(OUT_OF_MEMORY)  # here: inside of `except` it would hold on to the memory of the work
