"""What the nodes have to know of the prompt that is being run."""

from __future__ import annotations

from typing import Any


def page_server() -> Any:
    """ComfyUI's server, or None where ComfyUI runs without one."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


def running_prompt() -> dict:
    """The prompt (API format) at work now, for `fingerprint_inputs`, which is given no hidden inputs."""
    queue = getattr(page_server(), "prompt_queue", None)
    items = list(getattr(queue, "currently_running", {}).values())
    return items[-1][2] if items else {}


def has_preview(prompt: dict | None) -> bool:
    """Whether a prompt will look at the picks, so that they have to be recorded."""
    return any(node.get("class_type") == "ToMAPreview" for node in (prompt or {}).values())
