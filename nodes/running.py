"""What the nodes have to know of the prompt that is being run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def page_server() -> Any:
    """ComfyUI's server, or None where ComfyUI runs without one."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


@dataclass(frozen=True)
class Running:
    """A prompt at work, as the queue of the server holds it."""

    prompt_id: str
    prompt: dict  # API format
    client: str | None  # the page that queued it
    outputs: list[str]  # the output nodes that were asked for

    def is_under_way(self) -> bool:
        return any(item[1] == self.prompt_id for item in _items())

    def completed(self) -> bool:
        """Whether it came to its end without an error and without being stopped."""
        queue = getattr(page_server(), "prompt_queue", None)
        told = queue.get_history(prompt_id=self.prompt_id, map_function=dict) if queue else {}
        return bool(((told.get(self.prompt_id) or {}).get("status") or {}).get("completed"))


def _items() -> list[tuple]:
    """What the queue holds as running: (number, prompt id, prompt, extra data, outputs, ...)."""
    queue = getattr(page_server(), "prompt_queue", None)
    return list(getattr(queue, "currently_running", {}).values())


def running() -> Running | None:
    """The prompt at work now, if there is one."""
    items = _items()
    if not items:
        return None
    _, prompt_id, prompt, extra, outputs, *_ = items[-1]
    return Running(prompt_id, prompt, extra.get("client_id"), list(outputs))


def running_prompt() -> dict:
    """For `fingerprint_inputs`, which is given no hidden inputs."""
    now = running()
    return now.prompt if now else {}


def has_preview(prompt: dict | None) -> bool:
    """Whether a prompt will look at the picks, so that they have to be recorded."""
    return any(node.get("class_type") == "ToMAPreview" for node in (prompt or {}).values())
