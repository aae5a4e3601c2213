"""Whether inductor, torch.compile's own backend, can compile here."""

import os
import shutil

import torch


def why_not(folder: str = torch.__path__[0]) -> str:
    """The reason why it can't, in words for a skipped test, or nothing."""
    if not any(map(shutil.which, ("g++", "clang++", "cl"))):
        return "inductor needs a C++ compiler, and there is none"
    if " " in folder and os.name != "nt":
        return "inductor does not quote torch's folder in the compiler's command, and its path has a space"
    return ""
