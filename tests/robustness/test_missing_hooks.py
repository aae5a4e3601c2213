"""A ComfyUI that misses a hook: one line says which, and the other packs load."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from comfy_server import ROOT

SCRIPT = Path(__file__).with_name("without_hooks.py")
OF_COMFYUI = ("comfy", "comfy_api", "comfy_extras", "folder_paths", "server", "nodes", "execution")
# Asked for only by ToMACompare with a DINOv3 encoder.
FOR_ONE_FEATURE = {"comfy.clip_model:clip_preprocess", "comfy.model_management:load_model_gpu"}


def test_each_hook_is_missed_in_one_line(tmp_path, figure):
    from comfyui_toma.toma_core.patcher.compat import NEEDS, RELEASE

    hooks = [*NEEDS, "comfy.ldm.modules.diffusionmodules.openaimodel:"]  # the last one: a whole module
    ran = subprocess.run([sys.executable, SCRIPT, tmp_path, *hooks], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.pop("all there") == {"loaded": [True, True], "nodes": ["ToMA", "TrustModel"], "log": []}
    for hook, came in found.items():
        assert came["loaded"] == [False, True] and came["nodes"] == ["TrustModel"], (hook, came)
        assert len(came["log"]) == 1, came["log"]
        assert hook in came["log"][0] and f"ComfyUI {RELEASE}" in came["log"][0], came["log"]
    figure("hooks of ComfyUI", f"{len(hooks)} taken away one by one: one line names each, other packs load")


def imported_from_comfyui(path: Path) -> set[str]:
    """module:name of all that a file of ours imports from ComfyUI."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {f"{a.name}:" for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}:{a.name}" for a in node.names}
    return {name for name in found if re.split(r"[.:]", name)[0] in OF_COMFYUI}


def test_all_that_we_import_is_looked_up():
    from comfyui_toma.toma_core.patcher.compat import NEEDS, RELEASE

    files = [*(ROOT / "nodes").glob("*.py"), *(ROOT / "toma_core").rglob("*.py")]
    used = set().union(*map(imported_from_comfyui, files)) - FOR_ONE_FEATURE
    unknown = {name for name in used if not any(need.startswith(name) for need in NEEDS)}
    assert len(used) > 8 and not unknown, unknown
    assert f'requires-comfyui = ">={RELEASE}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
