"""ComfyUI-ToMA: faster sampling by forecast steps and merged tokens."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .toma_core.patcher.compat import check_comfyui

    check_comfyui()
    from .nodes import ToMAExtension

    return ToMAExtension()
