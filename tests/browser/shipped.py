# ruff: noqa: E501 - notes are one line a paragraph
"""The workflows that the pack ships, as data: build_workflows.py turns them into files in the real page."""

from __future__ import annotations

HOST = "https://huggingface.co/"
MODELS = {
    "sd_xl_base_1.0.safetensors": (
        "checkpoints",
        "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors",
    ),
    "flux1-dev.safetensors": ("diffusion_models", "Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors"),
    "flux1-dev-kontext_fp8_scaled.safetensors": (
        "diffusion_models",
        "Comfy-Org/flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/"
        "flux1-dev-kontext_fp8_scaled.safetensors",
    ),
    "clip_l.safetensors": (
        "text_encoders",
        "comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors",
    ),
    "t5xxl_fp16.safetensors": (
        "text_encoders",
        "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors",
    ),
    "t5xxl_fp8_e4m3fn_scaled.safetensors": (
        "text_encoders",
        "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp8_e4m3fn_scaled.safetensors",
    ),
    "ae.safetensors": (
        "vae",
        "Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors",
    ),
}
GREEN, RED = ("#232", "#353"), ("#322", "#533")
LOAD, PROMPT, SAMPLE, RESULT, LOOK = 0, 380, 760, 1150, 1500
ABOVE = -780


def node(id: str, type: str, x: float, y: float, width: int = 320, height: int = 0, **more) -> dict:
    return {"id": id, "type": type, "pos": [x, y], "size": [width, height], **more}


def loader(id: str, type: str, x: float, y: float, /, **widgets) -> dict:
    """A loader that tells the page where its files can be had, as ComfyUI's own templates do."""
    files = [
        {"name": name, "url": HOST + MODELS[name][1], "directory": MODELS[name][0]}
        for name in widgets.values()
        if name in MODELS
    ]
    return node(id, type, x, y, widgets=widgets, properties={"models": files})


def note(text: str, x: float = -400, y: float = 0, height: int = 440) -> dict:
    return node("note", "MarkdownNote", x, y, 360, height, widgets={"": text}, title="What to look at")


def prompt(id: str, text: str, y: float, colour=GREEN, title: str = "Prompt") -> dict:
    return node(id, "CLIPTextEncode", PROMPT, y, 340, 160, widgets={"text": text}, colour=colour, title=title)


def preview(x: float = LOOK, y: float = 0) -> dict:
    return node("preview", "ToMAPreview", x, y, 440, 660)


LANDSCAPE = "evening sunset scenery blue sky nature, glass bottle with a galaxy in it"
SDXL_START = [
    loader("load", "CheckpointLoaderSimple", LOAD, 0, ckpt_name="sd_xl_base_1.0.safetensors"),
    prompt("positive", LANDSCAPE, 600),
    prompt("negative", "text, watermark", 830, RED, "Negative prompt"),
    node("size", "EmptyLatentImage", LOAD, 200, widgets={"width": 1024, "height": 1024}),
]
SDXL_LINKS = [("load", 1, "positive", "clip"), ("load", 1, "negative", "clip")]
FLUX_LOADERS = [
    loader("clip", "DualCLIPLoader", LOAD, 180,
           clip_name1="clip_l.safetensors", clip_name2="t5xxl_fp16.safetensors", type="flux"),
    loader("vae", "VAELoader", LOAD, 410, vae_name="ae.safetensors"),
]  # fmt: skip


def sampler(id: str = "sample", x: float = SAMPLE, y: float = 0, **widgets) -> dict:
    fixed = {"seed": 1, "control_after_generate": "fixed"}
    return node(id, "KSampler", x, y, widgets={**fixed, "steps": 20, "cfg": 1, **widgets})


def sampling(model: str, positive: str, negative: str, latent: str, id: str = "sample", slots=(0, 0, 0, 0)) -> list:
    names = ("model", "positive", "negative", "latent_image")
    return [(a, slot, id, name) for a, slot, name in zip((model, positive, negative, latent), slots, names)]


def ending(latent: str = "sample", vae: tuple = ("load", 2), x: float = RESULT) -> tuple[list, list]:
    """Decode, save and look at it."""
    nodes = [
        node("decode", "VAEDecode", x, 0),
        node("save", "SaveImage", x, 120, 320, 400, widgets={"filename_prefix": "ToMA"}),
        preview(x + 350),
    ]
    links = [
        (latent, 0, "decode", "samples"), (*vae, "decode", "vae"), ("decode", 0, "save", "images"),
        ("decode", 0, "preview", "images"), ("toma", 0, "preview", "model"),
    ]  # fmt: skip
    return nodes, links


def sdxl() -> tuple[list, list]:
    end = ending()
    text = """## SDXL with ToMA

**ToMA** stands between the checkpoint and the sampler. It computes alike image tokens together.

What to look at
- the strip on **ToMA**: at which steps tokens are chosen anew, and how many tokens each step computes
- **ToMA Preview** after a run: move its step slider and switch its blocks
- the console: one sentence on what was merged and how long a step took

Try the presets **quality**, **balanced** and **fast** on the same seed. Bypass **ToMA** (Ctrl+B) for the unmerged picture."""
    nodes = [
        note(text), *SDXL_START, node("toma", "ToMA", PROMPT, 0, 340),
        sampler(steps=25, cfg=7, sampler_name="euler", scheduler="normal"), *end[0],
    ]  # fmt: skip
    links = [
        *SDXL_LINKS,
        ("load", 0, "toma", "model"),
        *sampling("toma", "positive", "negative", "size"),
        *end[1],
    ]
    return nodes, links


def flux() -> tuple[list, list]:
    end = ending(vae=("vae", 0))
    text = """## Flux.1 dev with ToMA

**ToMA** stands between the model loader and the sampler. At 1024 x 1024 Flux works on 4096 image tokens in every block; at most steps only the kept ones are computed.

What to look at
- the strip on **ToMA**: orange steps choose the tokens, blue ones reuse them
- **ToMA Preview**: switch between **double** and **single** blocks, and the style to **regions**

The larger the picture, the more is saved."""
    nodes = [
        note(text),
        loader("load", "UNETLoader", LOAD, 0, unet_name="flux1-dev.safetensors"), *FLUX_LOADERS,
        node("size", "EmptySD3LatentImage", LOAD, 540, widgets={"width": 1024, "height": 1024}),
        node("toma", "ToMA", PROMPT, 0, 340),
        prompt("positive", LANDSCAPE, 600),
        node("guidance", "FluxGuidance", PROMPT, 830, 340, widgets={"guidance": 3.5}),
        node("zero", "ConditioningZeroOut", PROMPT, 970, 340),
        sampler(scheduler="simple"), *end[0],
    ]  # fmt: skip
    links = [
        ("load", 0, "toma", "model"), ("clip", 0, "positive", "clip"), ("positive", 0, "guidance", "conditioning"),
        ("positive", 0, "zero", "conditioning"), *sampling("toma", "guidance", "zero", "size"), *end[1],
    ]  # fmt: skip
    return nodes, links


def flux_kontext() -> tuple[list, list]:
    end = ending(vae=("vae", 0))
    text = """## Flux.1 Kontext with ToMA

Kontext reads the picture to be edited as further tokens, so it has twice as many as plain Flux. ToMA merges the tokens of the new picture and leaves those of the reference as they are, so that the edit stays true to it.

What to look at
- **ToMA Preview**: the dots gather where the new picture has detail
- edits that must keep fine print or faces: use the preset **quality**"""
    nodes = [
        note(text),
        loader("load", "UNETLoader", LOAD, 0, unet_name="flux1-dev-kontext_fp8_scaled.safetensors"),
        loader("clip", "DualCLIPLoader", LOAD, 180, clip_name1="clip_l.safetensors",
               clip_name2="t5xxl_fp8_e4m3fn_scaled.safetensors", type="flux"),
        loader("vae", "VAELoader", LOAD, 410, vae_name="ae.safetensors"),
        node("picture", "LoadImage", LOAD, 540, 320, 330, title="Picture to edit"),
        node("scale", "FluxKontextImageScale", LOAD, 960),
        node("encode", "VAEEncode", LOAD, 1060),
        node("toma", "ToMA", PROMPT, 0, 340),
        prompt("positive", "change the background to a sunlit forest, keep everything else", 600, title="Edit"),
        node("reference", "ReferenceLatent", PROMPT, 830, 340),
        node("guidance", "FluxGuidance", PROMPT, 960, 340, widgets={"guidance": 2.5}),
        node("zero", "ConditioningZeroOut", PROMPT, 1090, 340),
        sampler(scheduler="simple"), *end[0],
    ]  # fmt: skip
    links = [
        ("load", 0, "toma", "model"), ("clip", 0, "positive", "clip"), ("picture", 0, "scale", "image"),
        ("scale", 0, "encode", "pixels"), ("vae", 0, "encode", "vae"),
        ("positive", 0, "reference", "conditioning"), ("encode", 0, "reference", "latent"),
        ("reference", 0, "guidance", "conditioning"), ("positive", 0, "zero", "conditioning"),
        *sampling("toma", "guidance", "zero", "encode"), *end[1],
    ]  # fmt: skip
    return nodes, links


def sdxl_hires() -> tuple[list, list]:
    end = ending("refine", x=RESULT + 360)
    text = """## SDXL, second pass at twice the area

One **ToMA** serves both samplers. Most of the time goes into the second pass, where merging saves most: there are more tokens, and they are more alike.

What to look at
- the console: a sentence for each pass, with its seconds a step
- **ToMA Preview** shows the second pass, the one whose picture it is given"""
    nodes = [
        note(text), *SDXL_START, node("toma", "ToMA", PROMPT, 0, 340),
        sampler(steps=25, cfg=7, scheduler="normal"),
        node("upscale", "LatentUpscaleBy", SAMPLE, 640, widgets={"upscale_method": "bislerp", "scale_by": 1.5}),
        sampler("refine", RESULT, 0, steps=20, cfg=7, scheduler="normal", denoise=0.5), *end[0],
    ]  # fmt: skip
    links = [
        *SDXL_LINKS, ("load", 0, "toma", "model"), *sampling("toma", "positive", "negative", "size"),
        ("sample", 0, "upscale", "samples"), *sampling("toma", "positive", "negative", "upscale", "refine"), *end[1],
    ]  # fmt: skip
    return nodes, links


def comparison(start: list, links: list, vae: tuple, step: dict, looks: float) -> tuple[list, list]:
    """The same seed with and without merging, side by side. `start` has load, positive, negative and size."""
    nodes = [
        *start,
        node("plain", "ToMA", PROMPT, ABOVE, 340, title="ToMA, ratio 0: only measures",
             widgets={"preset": "custom", "ratio": 0}),
        node("toma", "ToMA", PROMPT, 0, 340),
        sampler("reference", SAMPLE, ABOVE, **step), sampler("sample", SAMPLE, 0, **step),
        node("decode1", "VAEDecode", SAMPLE, ABOVE + 620), node("decode2", "VAEDecode", SAMPLE, 620),
        node("compare", "ToMACompare", RESULT, ABOVE, 700, 560),
        preview(RESULT, looks),
    ]  # fmt: skip
    links = [
        *links, ("load", 0, "plain", "model"), ("load", 0, "toma", "model"),
        *sampling("plain", "positive", "negative", "size", "reference"),
        *sampling("toma", "positive", "negative", "size"),
        ("reference", 0, "decode1", "samples"), ("sample", 0, "decode2", "samples"),
        (*vae, "decode1", "vae"), (*vae, "decode2", "vae"),
        ("decode1", 0, "compare", "reference"), ("decode2", 0, "compare", "image"),
        ("plain", 0, "compare", "reference_model"), ("toma", 0, "compare", "image_model"),
        ("decode2", 0, "preview", "images"), ("toma", 0, "preview", "model"),
    ]  # fmt: skip
    return nodes, links


def compare() -> tuple[list, list]:
    text = """## What does merging cost, what does it save?

The same seed twice: above with a **ToMA** whose ratio is 0 (it changes nothing and only measures), below with the preset under test.

What to look at
- **ToMA Compare**: both pictures, their difference, and how much faster a step was
- run twice: the first run also loads the model, so its seconds say little
- for a distance that sees content and not pixels, connect a **Load CLIP Vision** (DINOv2, DINOv3 or CLIP)"""
    step = dict(steps=25, cfg=7, scheduler="normal")
    nodes, links = comparison(SDXL_START, SDXL_LINKS, ("load", 2), step, -120)
    return [note(text, -40, ABOVE), *nodes], links


def demo() -> tuple[list, list]:
    text = """## ToMA in a minute, on a CPU

A small model that was trained for this pack's tests draws emoji: nothing is downloaded.

What to look at
- **ToMA** shows the kept tokens while it samples
- **ToMA Compare**: the unmerged picture, the merged one and their difference
- **ToMA Preview**: move the step slider, switch the blocks and the style

Other captions: **frog on yellow**, **robot on teal**, **pizza on black**."""
    start = [
        node("load", "ToMADemoLoader", LOAD, 0, widgets={"name": "flux"}),
        node("positive", "ToMADemoPrompt", LOAD, 180, widgets={"caption": "burger on teal"}, colour=GREEN),
        node("negative", "ToMADemoPrompt", LOAD, 400, widgets={"caption": ""}, colour=RED, title="Empty prompt"),
        node("size", "ToMADemoLatent", LOAD, 620),
    ]
    nodes, links = comparison(start, [], ("load", 1), dict(steps=12, cfg=1, scheduler="simple"), -120)
    return [note(text, -40, ABOVE), *nodes], links


WORKFLOWS = {
    "sdxl": sdxl, "flux": flux, "flux-kontext": flux_kontext, "sdxl-hires": sdxl_hires, "compare": compare,
}  # fmt: skip
DEMO = {"toma-demo": demo}
