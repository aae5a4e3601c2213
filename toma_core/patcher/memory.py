"""Out of memory, in the words of each device."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

# MPS, the CPU on Linux and on Windows, and MPS for a single tensor that is too large: plain RuntimeErrors.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")


class NoMemoryToMerge(Exception):
    """Our own work inside of a block found no memory: the block is to run again, unmerged."""


def raise_unless_out_of_memory(error: RuntimeError) -> None:
    """Raises the error again if it is about anything but memory."""
    is_oom = getattr(sys.modules.get("comfy.model_management"), "is_oom", None)  # not in 0.16
    if isinstance(error, torch.cuda.OutOfMemoryError) or (is_oom and is_oom(error)):
        return
    if not any(words in str(error).lower() for words in _WORDS):
        raise error


def ours(work: Callable, *args):
    """work(*args), which is of our own and inside of a block."""
    try:
        return work(*args)
    except RuntimeError as error:
        raise_unless_out_of_memory(error)
    raise NoMemoryToMerge  # here: inside of `except` it would hold on to the memory of the work
