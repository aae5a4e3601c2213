"""ComfyUI's own caches, as their nodes make them."""

from __future__ import annotations

START, END = 0.15, 0.95  # the nodes' defaults


def easycache(model, threshold: float):
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, threshold, START, END, False).args[0]


def lazycache(model, threshold: float):
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, threshold, START, END, False).args[0]
