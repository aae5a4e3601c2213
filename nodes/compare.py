"""The node `ToMACompare`: what a faster run cost the image, and how much faster it was."""

from __future__ import annotations

from math import inf, nan

import torch
from comfy_api.latest import io
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..toma_core import quality
from .images import as_files, check_images, shown_images
from .reports import NoRun, made_by, reports_of

_DARK = (20, 22, 26)


class ToMACompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMACompare",
            display_name="ToMA Compare",
            category="model/patch",
            description="Two images side by side with their difference, and one over the other to wipe between them: "
            "how alike they are, and how much faster the second one was made.",
            search_aliases=["psnr", "ssim", "image difference", "toma quality"],
            is_output_node=True,
            inputs=[
                io.Image.Input("reference", tooltip="The image to be compared with: made without ToMA."),
                io.Image.Input("image", tooltip="The image made with ToMA, from the same seed."),
                io.ClipVision.Input(
                    "clip_vision",
                    optional=True,
                    tooltip="DINOv2, DINOv3 or CLIP: adds a distance that sees content and not pixels.",
                ),
                io.Model.Input(
                    "reference_model",
                    optional=True,
                    tooltip="The model that made the reference, for its s/step: with a ToMA of ratio 0 and tolerance "
                    "0, which only measures.",
                ),
                io.Model.Input("image_model", optional=True, tooltip="The model that made the image."),
            ],
            outputs=[
                io.Image.Output("comparison", tooltip="Reference, image and difference, side by side."),
                io.Float.Output("psnr", tooltip="Decibels; higher is closer, infinite for equal images."),
                io.Float.Output("ssim", tooltip="Structural similarity: 1 for equal images."),
                io.Float.Output("embedding_distance", tooltip="0: equal content. No number without encoder."),
                io.Float.Output("reference_seconds", tooltip="s/step of reference_model."),
                io.Float.Output("image_seconds", tooltip="s/step of image_model."),
                io.Float.Output("speedup", tooltip="How many times faster a step was."),
                io.String.Output("summary", tooltip="All of it in one sentence."),
            ],
        )

    @classmethod
    def execute(
        cls, reference: Tensor, image: Tensor, clip_vision=None, reference_model=None, image_model=None
    ) -> io.NodeOutput:
        reference, image = check_images(reference, "reference"), check_images(image, "image")
        if reference.shape != image.shape:
            sizes = f"image is {_size(image)} and reference {_size(reference)}"
            raise ValueError(f"{sizes}: only images of the same size and number can be compared.")
        psnr, ssim = quality.psnr(reference, image), quality.ssim(reference, image)
        distance = _distance(clip_vision, reference, image) if clip_vision is not None else nan
        remarks: list[str] = []
        before = _seconds(reference_model, "reference_model", reference, remarks)
        after = _seconds(image_model, "image_model", image, remarks)
        speedup = before / after if before and after else nan
        drawn = _side_by_side(reference, image)
        text = " ".join([_sentence(psnr, ssim, distance, before, after, speedup), *remarks])
        some = shown_images(len(image))
        apart = quality.difference(reference[some], image[some])
        most = float(apart.max())
        wipe = {
            "reference": as_files(reference[some], cls),
            "image": as_files(image[some], cls),
            "difference": as_files(_heat(apart / (most or 1.0)), cls),
            "most": most,
            "numbers": some,
        }
        shown = {"images": as_files(drawn, cls), "toma_summary": [text], "toma_wipe": [wipe]}
        return io.NodeOutput(drawn, psnr, ssim, distance, before, after, speedup, text, ui=shown)


def _size(images: Tensor) -> str:
    count, height, width, _ = images.shape
    return f"{count} of {width}x{height}"


def _seconds(model, name: str, images: Tensor, remarks: list[str]) -> float:
    """s/step of the run of a model that made the images; nan without a model, or without a run: then a remark."""
    if model is None:
        return nan
    try:
        return made_by(reports_of(model, name), images, model).seconds_per_step
    except NoRun as why:
        remarks.append(f"No speed-up: {why}")
        return nan


def _distance(clip_vision, reference: Tensor, image: Tensor) -> float:
    return quality.embedding_distance(_embedding(clip_vision, reference), _embedding(clip_vision, image))


def _embedding(clip_vision, images: Tensor) -> Tensor:
    """What the encoder makes of the whole images, [B, D]."""
    if clip_vision.model_type != "dinov3":
        return clip_vision.encode_image(images, crop=False)["image_embeds"]
    # encode_image asks for hidden states that ComfyUI's DINOv3 does not give.
    from comfy.clip_model import clip_preprocess
    from comfy.model_management import load_model_gpu

    load_model_gpu(clip_vision.patcher)
    scale = {"mean": clip_vision.image_mean, "std": clip_vision.image_std}
    images = images.to(clip_vision.load_device)
    pixels = clip_preprocess(images, size=clip_vision.image_size, crop=False, **scale).float()
    return clip_vision.model(pixel_values=pixels)[2].cpu()


def _side_by_side(reference: Tensor, image: Tensor) -> Tensor:
    """Two [B, H, W, 3] to one [B, H', W', 3]: reference, image and difference, each under its name.
    Small images are blown up, so that there is room for the names."""
    times = max(1, 384 // image.shape[2])
    reference, image = (x.repeat_interleave(times, 1).repeat_interleave(times, 2) for x in (reference, image))
    apart = quality.difference(reference, image)
    most = float(apart.max()) or 1.0
    height, width = image.shape[1:3]
    gap = torch.tensor(_DARK).div(255).expand(height, max(4, width // 64), 3)
    names = _names(width, gap.shape[1], most)
    rows = [torch.cat([a, gap, b, gap, _heat(d / most)], 1) for a, b, d in zip(reference, image, apart)]
    return torch.stack([torch.cat([names, row]) for row in rows])


def _heat(share: Tensor) -> Tensor:
    """0..1 as black, red, yellow, white: [..., 3]"""
    return torch.stack([3 * share, 3 * share - 1, 3 * share - 2], -1).clamp(0, 1)


def _names(width: int, gap: int, most: float) -> Tensor:
    """The line above the images, [h, 3 width + 2 gap, 3], with the scale of the difference."""
    size = max(9, min(28, width // 16))
    font, pad = ImageFont.load_default(size), max(2, size // 3)
    base = pad + round(0.85 * size)
    line = Image.new("RGB", (3 * width + 2 * gap, size + 2 * pad), _DARK)
    draw = ImageDraw.Draw(line)
    for place, name in enumerate(("reference", "image", "difference")):
        draw.text((place * (width + gap) + pad, base), name, "white", font, anchor="ls")
    low = 2 * (width + gap) + 2 * pad + round(font.getlength("difference 0 "))
    high = line.width - pad - round(font.getlength(f" {most:.2f}"))
    draw.text((low - pad, base), "0", "white", font, anchor="rs")
    draw.text((line.width - pad, base), f"{most:.2f}", "white", font, anchor="rs")
    pixels = torch.frombuffer(bytearray(line.tobytes()), dtype=torch.uint8) / 255
    pixels = pixels.view(line.height, line.width, 3)
    if high - low > size:
        pixels[pad : pad + size, low:high] = _heat(torch.linspace(0, 1, high - low))
    return pixels


def _sentence(psnr: float, ssim: float, distance: float, before: float, after: float, speedup: float) -> str:
    likeness = f"PSNR {psnr:.1f} dB, SSIM {ssim:.3f}" if psnr < inf else "The images are equal (SSIM 1)"
    if distance == distance:
        likeness += f", embedding distance {distance:.3f}"
    if speedup == speedup:
        faster = f"{speedup:.2f} times as fast" if speedup >= 1 else f"{1 / speedup:.2f} times slower"
        return f"{likeness}; {faster}: {after:.3g} s/step instead of {before:.3g} s/step."
    return f"{likeness}."
