"""ComfyUI-ToMA: token merging with attention for SDXL and Flux."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import ToMAExtension

    return ToMAExtension()
