"""What of ComfyUI the pack can't do without, looked up as it is loaded: a release without it says so in one line,
and ComfyUI goes on with the other packs."""

from __future__ import annotations

import sys
from importlib import import_module

RELEASE = "0.16.3"  # requires-comfyui in pyproject.toml
NEEDS = (
    "comfy_api.latest:ComfyExtension",
    "comfy_api.latest:io.ComfyNode",
    "comfy_api.latest:io.Schema.search_aliases",
    "comfy_api.latest:io.NumberDisplay",
    "comfy_api.latest:ui.PreviewImage",
    "comfy.cli_args:args",
    "comfy.patcher_extension:WrappersMP.OUTER_SAMPLE",
    "comfy.patcher_extension:WrappersMP.PREDICT_NOISE",
    "comfy.patcher_extension:WrappersMP.APPLY_MODEL",
    "comfy.patcher_extension:WrappersMP.DIFFUSION_MODEL",
    "comfy.patcher_extension:add_wrapper_with_key",
    "comfy.model_patcher:create_model_options_clone",
    "comfy.model_patcher:ModelPatcher.get_model_object",
    "comfy.model_sampling:CONST",
    "comfy.ldm.modules.attention:optimized_attention",
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",
    "comfy_execution.utils:get_executing_context",
    "folder_paths:get_temp_directory",
    "server:PromptServer",
)


class UnsuitableComfyUI(RuntimeError):
    """This release of ComfyUI misses a hook; the message names it."""


def check_comfyui() -> None:
    missing = [hook for hook in NEEDS if not _is_there(hook)]
    if missing:
        version = getattr(sys.modules.get("comfyui_version"), "__version__", "of unknown version")
        raise UnsuitableComfyUI(
            f"ToMA is not loaded: this ComfyUI ({version}) has no {', '.join(missing)}. ToMA works from ComfyUI "
            f"{RELEASE} on: update ComfyUI, or ToMA if your ComfyUI is newer."
        )


def _is_there(hook: str) -> bool:
    module, _, path = hook.partition(":")
    try:
        found = import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if name in getattr(found, "__dataclass_fields__", {}):
            return True
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
