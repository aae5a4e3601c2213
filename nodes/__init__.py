"""What a user drags."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .compare import ToMACompare
from .live import add_route
from .preview import ToMAPreview
from .toma import ToMA


class ToMAExtension(ComfyExtension):
    async def on_load(self) -> None:
        add_route()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMA, ToMAPreview, ToMACompare]
