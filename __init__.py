"""ComfyUI-ToMA: token merging with attention for SDXL and Flux."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .toma_core.patcher.compat import check_comfyui

    check_comfyui()
    from .nodes import ToMAExtension

    return ToMAExtension()
