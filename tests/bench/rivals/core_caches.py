"""ComfyUI's own caches, as their nodes make them."""

from __future__ import annotations

START, END = 0.15, 0.95  # the nodes' defaults


def easycache(model, threshold: float):
    """It adds what it kept to the network's input in place. In half precision that input is a copy; in fp32, on flow
    models, it is the latent that the clean estimate is computed from, so here it gets a copy, too."""
    from comfy.patcher_extension import WrappersMP
    from comfy_extras.nodes_easycache import EasyCacheNode

    model = model.clone()
    model.add_wrapper_with_key(
        WrappersMP.DIFFUSION_MODEL, "a copy", lambda executor, x, *args, **kwargs: executor(x.clone(), *args, **kwargs)
    )
    return EasyCacheNode.execute(model, threshold, START, END, False).args[0]


def lazycache(model, threshold: float):
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, threshold, START, END, False).args[0]
