"""The checkout as the package `comfyui_toma`, whatever its folder is called.

The checkout itself must never be on sys.path: its `nodes` would hide ComfyUI's own.
"""

import importlib.util
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location(__name__, root / "__init__.py", submodule_search_locations=[str(root)])
module = importlib.util.module_from_spec(spec)
sys.modules[__name__] = module
spec.loader.exec_module(module)
