"""A prompt of the demo Flux in API format, small enough for every test."""

import uuid


def prompt(seed: int, preview: bool = False, tolerance: float = 0.0, steps: int = 2) -> dict:
    """Some steps of the demo Flux at 64 pixels; seeds are not used twice, or the server would answer from
    its cache."""
    nodes = {
        "load": ("ToMADemoLoader", {"name": "flux"}),
        "toma": ("ToMA", {
            "model": ["load", 0], "preset": "custom", "ratio": 0.5, "tile_size": "4", "reselect_every": 1,
            "reweight_every": 1, "start_percent": 0.0, "end_percent": 1.0, "merge": "whole block",
            "budget": "equal", "skip_first_blocks": 0, "tolerance": tolerance,
        }),
        "text": ("ToMADemoPrompt", {"caption": "fox on blue", "width": 64, "height": 64}),
        "size": ("ToMADemoLatent", {"width": 64, "height": 64, "batch_size": 1}),
        "sample": ("KSampler", {
            "model": ["toma", 0], "positive": ["text", 0], "negative": ["text", 0], "latent_image": ["size", 0],
            "seed": seed, "steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        }),
        "picture": ("VAEDecode", {"samples": ["sample", 0], "vae": ["load", 1]}),
        "show": ("PreviewImage", {"images": ["picture", 0]}),
    }  # fmt: skip
    if preview:
        looks = {"step": 0, "blocks": "", "style": "kept tokens"}
        nodes["look"] = ("ToMAPreview", {"model": ["toma", 0], "images": ["picture", 0], **looks})
    return {id: {"class_type": kind, "inputs": inputs} for id, (kind, inputs) in nodes.items()}


def new_seed() -> int:
    return uuid.uuid4().int % 10**9
