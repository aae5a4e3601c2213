# ruff: noqa: E501 - notes are one line a paragraph
"""The workflows that the pack ships, as data: build_workflows.py turns them into files in the real page."""

from __future__ import annotations

from shipped_models import HOST, MODELS

GREEN, RED = ("#232", "#353"), ("#322", "#533")
# Columns. Below the ToMA node nothing stands: it shows the kept tokens there while it runs.
LOAD, TEXT, TOMA, SAMPLE, RESULT = 0, 360, 740, 1120, 1480
BELOW, BESIDE = 720, 1000  # from a ToMA node to what stands below it, and to that of the next run beside it


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


def note(text: str, x: float = -400, y: float = 0, width: int = 360, height: int = 380) -> dict:
    return node("note", "MarkdownNote", x, y, width, height, widgets={"": text}, title="What to look at")


def prompt(id: str, text: str, y: float, colour=GREEN, title: str = "Prompt") -> dict:
    return node(id, "CLIPTextEncode", TEXT, y, 340, 160, widgets={"text": text}, colour=colour, title=title)


def toma(id: str = "toma", x: float = TOMA, y: float = 0, title: str | None = None, **widgets) -> dict:
    return node(id, "ToMA", x, y, 340, widgets=widgets, **({"title": title} if title else {}))


def preview(x: float, y: float = 0, id: str = "preview", **widgets) -> dict:
    return node(id, "ToMAPreview", x, y, 420, widgets=widgets)


LANDSCAPE = "evening sunset scenery blue sky nature, glass bottle with a galaxy in it"
SDXL_START = [
    loader("load", "CheckpointLoaderSimple", LOAD, 0, ckpt_name="sd_xl_base_1.0.safetensors"),
    prompt("positive", LANDSCAPE, 0),
    prompt("negative", "text, watermark", 220, RED, "Negative prompt"),
    node("size", "EmptyLatentImage", LOAD, 170, widgets={"width": 1024, "height": 1024}),
]
SDXL_LINKS = [("load", 1, "positive", "clip"), ("load", 1, "negative", "clip")]
SDXL_STEP = dict(steps=25, cfg=6, sampler_name="dpmpp_2m_sde", scheduler="karras")


def sampler(id: str = "sample", x: float = SAMPLE, y: float = 0, **widgets) -> dict:
    fixed = {"seed": 1, "control_after_generate": "fixed"}
    return node(id, "KSampler", x, y, widgets={**fixed, "steps": 20, "cfg": 1, **widgets})


def sampling(model: str, positive: str, negative: str, latent: str, id: str = "sample") -> list:
    names = ("model", "positive", "negative", "latent_image")
    return [(a, 0, id, name) for a, name in zip((model, positive, negative, latent), names)]


def ending(latent: str = "sample", vae: tuple = ("load", 2), x: float = RESULT, **looks) -> tuple[list, list]:
    """Decode, save and look at it."""
    nodes = [
        node("decode", "VAEDecode", x, 0),
        node("save", "SaveImage", x, 110, 320, 400, widgets={"filename_prefix": "ToMA"}),
        preview(x + 360, **looks),
    ]
    links = [
        (latent, 0, "decode", "samples"), (*vae, "decode", "vae"), ("decode", 0, "save", "images"),
        ("decode", 0, "preview", "images"), ("toma", 0, "preview", "model"),
    ]  # fmt: skip
    return nodes, links


def sdxl() -> tuple[list, list]:
    end = ending(style="forecast error")
    text = """## SDXL with ToMA

**ToMA** stands between the checkpoint and the sampler. Steps whose answer can be forecast are not run. The first ones, in which the image takes shape, run in full, and so does the last.

What to look at
- the strip on **ToMA**: full and forecast steps; move over a bar to read why
- its last line after a run: how much faster it was, by work done and by the clock
- **ToMA Preview**: move its step slider; its style **forecast error** shows where a forecast would have been wrong

Try the presets **quality**, **balanced** and **fast** on the same seed. Bypass **ToMA** (Ctrl+B) for the plain image."""
    nodes = [note(text, height=440), *SDXL_START, toma(), sampler(**SDXL_STEP), *end[0]]
    links = [*SDXL_LINKS, ("load", 0, "toma", "model"), *sampling("toma", "positive", "negative", "size"), *end[1]]
    return nodes, links


def flux_like(text: str, loaders: list, size: dict, step: dict, between: list = (), **looks) -> tuple[list, list]:
    """A diffusion transformer with its loaders `load`, `clip` and `vae`, without a negative prompt. `between`: nodes from
    the loader to ToMA, (type, widgets)."""
    end = ending(vae=("vae", 0), **looks)
    chain = [node(f"model{i}", kind, LOAD, 600 + 110 * i, widgets=widgets) for i, (kind, widgets) in enumerate(between)]
    names = ["load", *(made["id"] for made in chain), "toma"]
    nodes = [note(text), *loaders, *chain, size, prompt("positive", LANDSCAPE, 0), toma(**step.pop("toma", {})),
             node("zero", "ConditioningZeroOut", TEXT, 330, 340), sampler(**step), *end[0]]  # fmt: skip
    links = [
        *((a, 0, b, "model") for a, b in zip(names, names[1:])), ("clip", 0, "positive", "clip"),
        ("positive", 0, "zero", "conditioning"), *end[1],
    ]  # fmt: skip
    return nodes, links


def flux() -> tuple[list, list]:
    text = """## Flux.1 dev with ToMA

**ToMA** stands between the model loader and the sampler. About every other answer of Flux can be forecast from those before it: these steps cost nothing.

What to look at
- the strip on **ToMA**: before a run what the preset may do, while it runs what it does, after it what it did and why
- the curve below the bars: how far off a forecast would have been at each step that was computed, against the tolerance
- **ToMA Preview**: the style **forecast error**, step by step

More **tolerance** is faster; 0 forecasts nothing."""
    loaders = [
        loader("load", "UNETLoader", LOAD, 0, unet_name="flux1-dev.safetensors"),
        loader("clip", "DualCLIPLoader", LOAD, 130, clip_name1="clip_l.safetensors",
               clip_name2="t5xxl_fp16.safetensors", type="flux"),
        loader("vae", "VAELoader", LOAD, 310, vae_name="ae.safetensors"),
    ]  # fmt: skip
    size = node("size", "EmptySD3LatentImage", LOAD, 450, widgets={"width": 1024, "height": 1024})
    nodes, links = flux_like(text, loaders, size, dict(scheduler="simple"), style="forecast error")
    nodes.append(node("guidance", "FluxGuidance", TEXT, 220, 340, widgets={"guidance": 3.5}))
    return nodes, [
        *links, ("positive", 0, "guidance", "conditioning"), *sampling("toma", "guidance", "zero", "size")
    ]  # fmt: skip


def z_image_turbo() -> tuple[list, list]:
    text = """## Z-Image-Turbo with ToMA: eight steps, merged

Few steps leave little to forecast from. This workflow merges instead (preset **custom**, **ratio** 0.35, **tolerance** 0): after the first step each one runs on two thirds of the image tokens, and the last in full.

What to look at
- the strip on **ToMA**: merged steps are as tall as what they compute; while they run, the kept tokens are shown below it
- **ToMA Preview**: move the step slider to see which tokens were kept, and try the styles **regions** and **density**

Then set the preset **turbo**, which forecasts instead, and compare on the same seed: speed in the last line of the strip, closeness by eye."""
    loaders = [
        loader("load", "UNETLoader", LOAD, 0, unet_name="z_image_turbo_bf16.safetensors"),
        loader("clip", "CLIPLoader", LOAD, 130, clip_name="qwen_3_4b.safetensors", type="lumina2"),
        loader("vae", "VAELoader", LOAD, 290, vae_name="ae.safetensors"),
    ]
    size = node("size", "EmptySD3LatentImage", LOAD, 430, widgets={"width": 1024, "height": 1024})
    merging = {"preset": "custom", "ratio": 0.35, "tolerance": 0, "tile_size": "8"}
    step = dict(steps=8, sampler_name="res_multistep", scheduler="simple", toma=merging)
    between = [("ModelSamplingAuraFlow", {"shift": 3.0})]
    nodes, links = flux_like(text, loaders, size, step, between)
    return nodes, [*links, *sampling("toma", "positive", "zero", "size")]


def with_negative(text: str, loaders: list, size: dict, words: tuple, step: dict, between: list) -> tuple[list, list]:
    """A diffusion transformer with both prompts: nodes and links up to the sampler."""
    chain = [node(f"model{i}", kind, LOAD, 610 + 110 * i, widgets=widgets) for i, (kind, widgets) in enumerate(between)]
    names = ["load", *(made["id"] for made in chain), "toma"]
    nodes = [note(text), *loaders, *chain, size, prompt("positive", words[0], 0),
             prompt("negative", words[1], 220, RED, "Negative prompt"), toma(), sampler(**step)]  # fmt: skip
    links = [
        *((a, 0, b, "model") for a, b in zip(names, names[1:])), ("clip", 0, "positive", "clip"),
        ("clip", 0, "negative", "clip"), *sampling("toma", "positive", "negative", "size"),
    ]  # fmt: skip
    return nodes, links


def qwen_image() -> tuple[list, list]:
    text = """## Qwen-Image with ToMA

Two prompts, twenty steps, twenty billion weights: every step that is forecast saves both passes through the network.

What to look at
- the strip on **ToMA**: move over a bar to read why it was full or forecast
- **ToMA Preview**, style **forecast error**: fine print and edges light up first. If lettering suffers, use **quality**"""
    loaders = [
        loader("load", "UNETLoader", LOAD, 0, unet_name="qwen_image_fp8_e4m3fn.safetensors"),
        loader("clip", "CLIPLoader", LOAD, 130, clip_name="qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
        loader("vae", "VAELoader", LOAD, 290, vae_name="qwen_image_vae.safetensors"),
    ]
    size = node("size", "EmptySD3LatentImage", LOAD, 430, widgets={"width": 1328, "height": 1328})
    step = dict(steps=20, cfg=2.5, scheduler="simple")
    between = [("ModelSamplingAuraFlow", {"shift": 3.1})]
    words = ('a bookshop window at night, a hand-painted sign says "ToMA"', "")
    nodes, links = with_negative(text, loaders, size, words, step, between)
    end = ending(vae=("vae", 0), style="forecast error")
    return [*nodes, *end[0]], [*links, *end[1]]


def wan_video() -> tuple[list, list]:
    text = """## Wan video with ToMA

Every step works on all frames at once, so a step that is forecast saves much.

What to look at
- the strip on **ToMA**
- **ToMA Preview**, style **forecast error**: choose the frame with the second slider. What moves fast is forecast worst
- **frame** 0 draws all frames: connect **overlay** to a **Create Video** to see them run"""
    loaders = [
        loader("load", "UNETLoader", LOAD, 0, unet_name="wan2.1_t2v_1.3B_fp16.safetensors"),
        loader("clip", "CLIPLoader", LOAD, 130, clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan"),
        loader("vae", "VAELoader", LOAD, 290, vae_name="wan_2.1_vae.safetensors"),
    ]
    size = node("size", "EmptyHunyuanLatentVideo", LOAD, 430, widgets={"width": 832, "height": 480, "length": 33})
    step = dict(steps=30, cfg=6, sampler_name="uni_pc", scheduler="simple")
    words = (
        "a fox running through a snowy forest, tracking camera, daylight",
        "blurred, static, subtitles, low quality",
    )
    nodes, links = with_negative(text, loaders, size, words, step, [("ModelSamplingSD3", {"shift": 8.0})])
    nodes += [
        node("decode", "VAEDecode", RESULT, 0),
        node("video", "CreateVideo", RESULT, 110, widgets={"fps": 16}),
        node("save", "SaveVideo", RESULT, 240, 320, 300, widgets={"filename_prefix": "video/ToMA"}),
        preview(RESULT + 360, style="forecast error"),
    ]
    links += [
        ("sample", 0, "decode", "samples"), ("vae", 0, "decode", "vae"), ("decode", 0, "video", "images"),
        ("video", 0, "save", "video"), ("decode", 0, "preview", "images"), ("toma", 0, "preview", "model"),
    ]  # fmt: skip
    return nodes, links


def flux_kontext() -> tuple[list, list]:
    end = ending(vae=("vae", 0), style="forecast error")
    text = """## Flux.1 Kontext with ToMA

Kontext reads the image to be edited as further tokens, so every step costs twice as much as one of plain Flux: a forecast saves twice as much. Where steps are merged, only tokens of the new image are: the reference stays as it is.

What to look at
- the strip on **ToMA** and its last line
- **ToMA Preview**: where forecasts were wrong; in an edit mostly what is changed
- edits that must keep fine print or faces: use the preset **quality**"""
    nodes = [
        note(text),
        loader("load", "UNETLoader", LOAD, 0, unet_name="flux1-dev-kontext_fp8_scaled.safetensors"),
        loader("clip", "DualCLIPLoader", LOAD, 130, clip_name1="clip_l.safetensors",
               clip_name2="t5xxl_fp8_e4m3fn_scaled.safetensors", type="flux"),
        loader("vae", "VAELoader", LOAD, 310, vae_name="ae.safetensors"),
        node("image", "LoadImage", LOAD, 450, 320, 330, title="Image to edit"),
        node("scale", "FluxKontextImageScale", TEXT, 560, 340),
        node("encode", "VAEEncode", TEXT, 650, 340),
        toma(),
        prompt("positive", "change the background to a sunlit forest, keep everything else", 0, title="Edit"),
        node("reference", "ReferenceLatent", TEXT, 220, 340),
        node("guidance", "FluxGuidance", TEXT, 330, 340, widgets={"guidance": 2.5}),
        node("zero", "ConditioningZeroOut", TEXT, 450, 340),
        sampler(scheduler="simple"), *end[0],
    ]  # fmt: skip
    links = [
        ("load", 0, "toma", "model"), ("clip", 0, "positive", "clip"), ("image", 0, "scale", "image"),
        ("scale", 0, "encode", "pixels"), ("vae", 0, "encode", "vae"),
        ("positive", 0, "reference", "conditioning"), ("encode", 0, "reference", "latent"),
        ("reference", 0, "guidance", "conditioning"), ("positive", 0, "zero", "conditioning"),
        *sampling("toma", "guidance", "zero", "encode"), *end[1],
    ]  # fmt: skip
    return nodes, links


def sdxl_hires() -> tuple[list, list]:
    end = ending("refine", x=RESULT + 360, style="forecast error")
    text = """## SDXL, second pass at twice the area

One **ToMA** serves both samplers. Most of the time goes into the second pass, where a step that is forecast saves most.

What to look at
- the strip on **ToMA** shows the pass that ran last; the console has a line for each, with its s/step
- **ToMA Preview** shows the second pass, the one whose image it is given"""
    second = {**SDXL_STEP, "steps": 20, "denoise": 0.5}
    nodes = [
        note(text), *SDXL_START, toma(), sampler(**SDXL_STEP),
        node("upscale", "LatentUpscaleBy", SAMPLE, 330, widgets={"upscale_method": "bislerp", "scale_by": 1.5}),
        sampler("refine", RESULT, 0, **second), *end[0],
    ]  # fmt: skip
    links = [
        *SDXL_LINKS, ("load", 0, "toma", "model"), *sampling("toma", "positive", "negative", "size"),
        ("sample", 0, "upscale", "samples"), *sampling("toma", "positive", "negative", "upscale", "refine"), *end[1],
    ]  # fmt: skip
    return nodes, links


PLAIN = {"preset": "custom", "ratio": 0, "tolerance": 0}


def comparison(
    text: str, start: list, links: list, vae: tuple, step: dict, runs: dict[str, tuple]
) -> tuple[list, list]:
    """The same seed plain and with ToMA: the plain run below the loaders, the others side by side. `start` has load,
    positive, negative and size; `runs`: title and widgets of ToMA, widgets of the preview."""
    rows = {"plain": ("ToMA, ratio 0 and tolerance 0: only measures", PLAIN, None), **runs}
    nodes, links = [*start, note(text, LOAD, 430, 700, 230)], list(links)
    for i, (name, (title, widgets, looks)) in enumerate(rows.items()):
        x, y = (TOMA + (i - 1) * BESIDE, 0) if i else (LOAD, BELOW)
        nodes += [toma(name, x, y, title, **widgets), sampler(f"sample {name}", x + 360, y, **step),
                  node(f"decode {name}", "VAEDecode", x + 360, y + 320)]  # fmt: skip
        links += [("load", 0, name, "model"), *sampling(name, "positive", "negative", "size", f"sample {name}"),
                  (f"sample {name}", 0, f"decode {name}", "samples"), (*vae, f"decode {name}", "vae")]  # fmt: skip
        if looks is None:
            continue
        compare, look = f"compare {name}", f"look {name}"
        nodes += [node(compare, "ToMACompare", x, BELOW, 520, title=f"{title}, compared" if title else None),
                  preview(x + 540, BELOW, look, **looks)]  # fmt: skip
        links += [
            ("decode plain", 0, compare, "reference"), (f"decode {name}", 0, compare, "image"),
            ("plain", 0, compare, "reference_model"), (name, 0, compare, "image_model"),
            (f"decode {name}", 0, look, "images"), (name, 0, look, "model"),
        ]  # fmt: skip
    return nodes, links


def compare() -> tuple[list, list]:
    text = """## What does it cost, what does it save?

The same seed twice: below with a **ToMA** whose ratio and tolerance are 0 (it changes nothing and only measures), above with the preset under test.

What to look at
- **ToMA Compare**: drag the bar to wipe between both images, with the difference beside it, and how much faster a step was
- run twice: the first run also loads the model, so its s/step says little
- for a distance that sees content and not pixels, connect a **Load CLIP Vision** (DINOv2, DINOv3 or CLIP)"""
    looks = {"style": "forecast error"}
    return comparison(text, SDXL_START, SDXL_LINKS, ("load", 2), SDXL_STEP, {"toma": (None, {}, looks)})


def demo() -> tuple[list, list]:
    text = """## ToMA in a minute, on a CPU

A small model that was trained for this pack's tests draws emoji: nothing is downloaded. Three runs of one seed: plain below, and side by side one with forecast steps and one with merged steps.

What to look at
- the strips on **ToMA** while they run and after
- **ToMA Compare**: drag the bar to wipe between the plain image and the faster one
- **ToMA Preview**: where forecasts were wrong, which tokens were kept; move the step slider

Other captions: **frog on yellow**, **robot on teal**, **pizza on black**."""
    start = [
        node("load", "ToMADemoLoader", LOAD, 0, widgets={"name": "flux"}),
        node("positive", "ToMADemoPrompt", TEXT, 0, 340, widgets={"caption": "burger on teal"}, colour=GREEN),
        node("negative", "ToMADemoPrompt", TEXT, 190, 340, widgets={"caption": ""}, colour=RED, title="Empty prompt"),
        node("size", "ToMADemoLatent", LOAD, 190),
    ]
    merged = {"preset": "custom", "ratio": 0.5, "tolerance": 0, "end_percent": 0.75, "tile_size": "8"}
    runs = {"forecast": ("ToMA, forecast", {}, {"style": "forecast error"}), "merged": ("ToMA, merged", merged, {})}
    return comparison(text, start, [], ("load", 1), dict(steps=16, cfg=1, scheduler="simple"), runs)


WORKFLOWS = {
    "sdxl": sdxl, "flux": flux, "z-image-turbo": z_image_turbo, "qwen-image": qwen_image, "wan-video": wan_video,
    "flux-kontext": flux_kontext, "sdxl-hires": sdxl_hires, "compare": compare,
}  # fmt: skip
DEMO = {"toma-demo": demo}
