"""ComfyUI imported into this process, on the CPU with SDPA attention."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def import_comfyui(base: Path, *arguments: str) -> None:
    """After this `comfy`, `nodes`, `folder_paths` and the rest can be imported. Once per process.

    `base` takes what ComfyUI writes: models, outputs, user settings.
    """
    for folder in ("custom_nodes", "input", "output", "temp", "user", "models"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    import comfy.options

    comfy.options.enable_args_parsing()
    given = sys.argv
    sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention", "--base-directory", str(base)]
    sys.argv += ["--database-url", "sqlite:///:memory:", *arguments]
    try:
        import comfy.cli_args
    finally:
        sys.argv = given
    import folder_paths  # noqa: F401
    import utils.extra_config  # noqa: F401 - as main.py does, before `nodes` puts comfy/ with its utils.py first (to 0.24)

    import nodes  # noqa: F401


def finish(coroutine: Coroutine):
    """asyncio.run, also where Playwright has left its event loop running in this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
