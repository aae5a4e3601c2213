"""The demo models on the canvas."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import loading
from .captions import COLOURS, SUBJECTS

CATEGORY = "ToMA/demo"
LOADERS = {
    "flux": loading.load_demo_flux,
    "sdxl-like unet": loading.load_demo_unet,
    "flux, 4 steps": loading.load_demo_student,
}
_SIZE = {"default": 128, "min": 64, "max": 512, "step": 16}


class ToMADemoLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMADemoLoader",
            display_name="ToMA Demo Model",
            category=CATEGORY,
            description="A small model that was trained for ToMA's tests: draws emoji at 128 or 256 pixels.",
            inputs=[
                io.Combo.Input(
                    "name",
                    options=list(LOADERS),
                    tooltip="Flux's or SDXL's architecture, in small; or Flux with a LoRA that was distilled "
                    "to 4 Euler steps at cfg 1.",
                )
            ],
            outputs=[
                io.Model.Output(),
                io.Vae.Output(tooltip="Pictures to latents of half the side and back, without loss."),
            ],
        )

    @classmethod
    def execute(cls, name: str) -> io.NodeOutput:
        model = LOADERS[name]()
        return io.NodeOutput(model, loading.load_demo_codec(model))


class ToMADemoPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMADemoPrompt",
            display_name="ToMA Demo Prompt",
            category=CATEGORY,
            description=f"Subjects: {', '.join(SUBJECTS)}. Colours: {', '.join(COLOURS)}.",
            inputs=[
                io.String.Input(
                    "caption",
                    default="fox on blue",
                    tooltip="<subject> on <colour>; empty for the negative prompt.",
                ),
                io.Int.Input("width", tooltip="The picture's width: these models have to be told.", **_SIZE),
                io.Int.Input("height", tooltip="The picture's height.", **_SIZE),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, caption: str, width: int, height: int) -> io.NodeOutput:
        return io.NodeOutput(loading.encode_prompt(caption, width, height))


class ToMADemoLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMADemoLatent",
            display_name="ToMA Demo Latent",
            category=CATEGORY,
            description="An empty latent, half the picture's side. 128 pixels are 1024 tokens, 256 are 4096.",
            inputs=[
                io.Int.Input("width", **_SIZE),
                io.Int.Input("height", **_SIZE),
                io.Int.Input("batch_size", default=1, min=1, max=64),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int) -> io.NodeOutput:
        return io.NodeOutput(loading.empty_latent(width, height, batch_size))


class DemoExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMADemoLoader, ToMADemoPrompt, ToMADemoLatent]
