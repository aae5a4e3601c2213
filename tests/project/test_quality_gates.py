"""ruff and mypy are clean, with the settings in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_server import DEV, ROOT, link


def clean(command: list[str], folder: Path = ROOT, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=folder, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [["check", "--output-format=concise"], ["format", "--check"]], ids=lambda c: c[0])
def test_ruff(command):
    clean(["ruff", *command, str(ROOT)])


def test_types(tmp_path):
    """The checkout is a package whose folder can have any name: here it gets one that mypy can read."""
    pytest.importorskip("mypy")
    link(ROOT, tmp_path / "comfyui_toma")
    command = ["mypy", f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={DEV / 'mypy'}"]
    clean([*command, "-p", "comfyui_toma.toma_core", "-p", "comfyui_toma.nodes"], tmp_path, MYPYPATH=str(tmp_path))


def test_one_line_width():
    """ruff's, and nobody else's."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "line-length = 120" in text
    assert not list(ROOT.glob("tests/**/ruff.toml")) + list(ROOT.glob("*/pyproject.toml"))
