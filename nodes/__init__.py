"""What a user drags."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .toma import ToMA


class ToMAExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMA]
