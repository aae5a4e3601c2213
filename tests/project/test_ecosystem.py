"""Real parts of the ecosystem accept the pack: the server, comfy-cli, the Manager, ruff."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"", ".py", ".toml", ".txt", ".md", ".js", ".css", ".json", ".jpg", ".png"}
NODES = {"ToMA", "ToMAPreview", "ToMACompare"}


def comfy_cli(folder: Path, home: Path, *arguments: str) -> str:
    env = {**os.environ, "HOME": str(home), "USERPROFILE": str(home), "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "comfy_cli", "--skip-prompt", "--no-enable-telemetry", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """What the registry would hand out, made by comfy-cli from the files of this checkout."""
    from comfy_server import copy_pack

    copy = tmp_path_factory.mktemp("registry") / "copy"
    copy_pack(ROOT, copy)
    comfy_cli(copy, copy.parent, "node", "pack")
    return copy / "node.zip"


@pytest.fixture(scope="module")
def manager_server(archive, tmp_path_factory):
    """The archive installed as the Manager does it, under a trying name, with the Manager on and offline."""
    from comfy_server import ComfyServer

    base = tmp_path_factory.mktemp("manager")
    pack = base / "custom_nodes" / "my ComfyUI-ToMA - a copy"
    with zipfile.ZipFile(archive) as files:
        files.extractall(pack)
        (pack / ".tracking").write_text("\n".join(files.namelist()))
    config = base / "user" / "__manager" / "config.ini"
    config.parent.mkdir(parents=True)
    config.write_text("[default]\nnetwork_mode = offline\n")
    with ComfyServer(base, packs={}, arguments=("--enable-manager",)) as running:
        yield running


def complaints(log: str) -> list[str]:
    """Lines that complain: of ComfyUI's logger or of Python's."""
    return re.findall(r"^.*(?:WARNING|ERROR|CRITICAL|Traceback|Warning:|IMPORT FAILED).*$", log, re.MULTILINE)


def test_server_lists_the_nodes_and_logs_nothing(server):
    info = server.get("/object_info")
    assert set(info) >= NODES
    assert {info[name]["python_module"] for name in NODES} == {"custom_nodes.ComfyUI-ToMA"}
    assert complaints(server.startup_log) == []


def test_nothing_is_written_into_comfyuis_tree(server):
    tree = Path(os.environ["COMFYUI_PATH"])
    assert [path for path in tree.rglob("*") if path.lstat().st_mtime > server.started] == []


def test_server_serves_core_templates(server):
    assert server.get("/templates/index.json")[0]["templates"]


def test_comfy_node_validate(tmp_path):
    report = comfy_cli(ROOT, tmp_path, "node", "validate")
    assert "All validation checks passed" in report
    assert "arning" not in report


def test_archive_holds_the_pack_and_nothing_else(archive):
    with zipfile.ZipFile(archive) as files:
        names = set(files.namelist())
    files = {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md", "CHANGELOG.md"}
    folders = {"nodes", "toma_core", "web", "workflows", "locales"}
    assert {name.split("/")[0] for name in names} == files | folders
    assert not [name for name in names if Path(name).suffix not in KINDS], "only what users need"
    assert archive.stat().st_size < 2_000_000


def test_loads_under_a_name_with_spaces_and_dashes(manager_server):
    info = manager_server.get("/object_info")
    assert {info[name]["python_module"] for name in NODES} == {"custom_nodes.my ComfyUI-ToMA - a copy"}
    assert "IMPORT FAILED" not in manager_server.log


def test_manager_lists_the_pack_as_installed(manager_server):
    installed = manager_server.get("/v2/customnode/installed")
    entry = installed["my ComfyUI-ToMA - a copy"]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert entry == {"ver": version, "cnr_id": "toma", "aux_id": None, "enabled": True}


def test_requirements_leave_the_users_torch_alone():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert not [line for line in lines if line.startswith("torch") or "==" in line]
