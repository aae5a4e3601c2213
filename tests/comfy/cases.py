"""What people do with models, as data: each case is sampled unmerged and merged, and compared.

`run` are arguments of builders.sample; `conds` names a function of setups.py that makes the conditioning;
`model` one that prepares the model. Sizes are pixels; a latent pixel is 8 of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    name: str
    models: tuple[str, ...] = ("flux", "sdxl")
    run: dict = field(default_factory=dict)
    conds: str = "plain"
    merges: bool = True  # else it is the unmerged latent, and the report says why
    far: float = 1.3  # bound of the relative distance at ratio 0.75: with random weights no two tokens are alike


CASES = [
    Case("square", ("flux", "sdxl", "sd15"), {"width": 256, "height": 256}),
    Case("small square", ("flux2", "chroma")),
    Case("portrait", ("flux", "sdxl"), {"width": 192, "height": 320}),
    Case("small portrait", ("sd15", "flux2", "chroma"), {"width": 96, "height": 144}),
    Case("landscape", run={"width": 320, "height": 192}),
    Case("odd sides", ("flux", "sdxl", "sd15"), {"width": 280, "height": 168}),
    Case("prime grid", run={"width": 8 * 37, "height": 8 * 23}),
    Case("thin", run={"width": 1024, "height": 64}),
    Case("as wide as it gets", run={"width": 2048, "height": 256, "steps": 2, "cfg": 1.0}),
    Case("as tall as it gets", run={"width": 264, "height": 2040, "steps": 2, "cfg": 1.0}),
    Case("film", ("flux",), {"width": 1360, "height": 768, "steps": 2, "cfg": 1.0}),
    Case("batch of 2", run={"batch": 2}),
    Case("batch of 3", ("flux",), {"batch": 3}),
    Case("batch of 4", ("sdxl",), {"batch": 4}),
    Case("no guidance", ("sdxl",), {"cfg": 1.0}),
    Case("guidance", ("flux",), {"cfg": 3.0}),
    Case("prompts of different lengths", run={"cfg": 3.0}, conds="lengths"),
    Case("area", run={"cfg": 3.0, "width": 256, "height": 256}, conds="area"),
    Case("mask", run={"cfg": 3.0}, conds="mask"),
    Case("prompt that starts late", run={"cfg": 3.0, "steps": 6}, conds="late"),
    Case("image to image", run={"denoise": 0.6, "latent": "noise"}),
    Case("inpainting", run={"latent": "noise", "noise_mask": True, "denoise": 0.8}),
    Case("four steps", run={"steps": 4}),
    Case("one step", ("sdxl",), run={"steps": 1}),
    Case("one step in full", ("flux",), run={"steps": 1}, merges=False),  # there is no clean estimate to merge by
    Case("controlnet", run={"cfg": 2.0}, conds="control"),
    Case("reference latent", ("flux", "flux2"), conds="reference"),
    Case("two reference latents", ("flux",), conds="two_references"),
    Case("reference of timestep zero", ("flux2",), conds="reference_zero", merges=False),
    Case("attention mask", ("flux",), conds="attention_mask"),
]
