"""The house: which way imports point, and that no file outgrows a reader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMFYUI = {
    "comfy", "comfy_api", "comfy_extras", "comfy_execution", "comfyui_version", "execution", "folder_paths",
    "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip
LONGEST = 400


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "patcher" if parts[:2] == ("toma_core", "patcher") else parts[0]


def imported(path: Path) -> Iterator[str]:
    """The modules that a file of ours imports, also inside of functions: ours as folders from the root, by dots."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ("ours." + ".".join([*base, name]) for name in names)


MAY_IMPORT = {
    "toma_core": ("ours.toma_core",),
    "patcher": ("ours.toma_core",),
    "nodes": ("ours.toma_core", "ours.nodes"),
}


@pytest.mark.parametrize("path", python_files("toma_core", "nodes"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    """nodes -> toma_core.patcher -> toma_core, and only the first two know ComfyUI."""
    layer, names = layer_of(path), list(imported(path))
    for name in (name for name in names if name.startswith("ours.")):
        assert name.startswith(MAY_IMPORT[layer]), name
        assert layer != "toma_core" or not name.startswith("ours.toma_core.patcher"), name
    assert not any(name.split(".")[0] in ("toma_core", "tests") for name in names), "imports of ours are relative"
    if layer == "toma_core":
        assert not {name.split(".")[0] for name in names} & COMFYUI


def test_the_door_imports_nodes_alone():
    ours = {name.split(".")[1] for name in imported(ROOT / "__init__.py") if name.startswith("ours.")}
    assert ours <= {"nodes", "toma_core"} and "nodes" in ours


@pytest.mark.parametrize("layer,line", [("toma_core", "from .patcher import x"), ("toma_core", "import comfy.utils")])
def test_a_wrong_import_would_be_seen(tmp_path, monkeypatch, layer, line):
    path = tmp_path / layer / "wrong.py"
    path.parent.mkdir()
    path.write_text(f"def f():\n    {line}\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        test_imports_point_one_way(path)


def test_no_file_is_too_long():
    """dev.py aside, which is one file so that it needs nothing else."""
    files = [ROOT / "__init__.py", *python_files("nodes", "toma_core", "tests")]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert len(lengths) > 40
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
