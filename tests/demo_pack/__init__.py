"""Demo models for tests, benchmarks and `serve`. Not part of what users install."""


async def comfy_entrypoint():
    from .nodes import DemoExtension

    return DemoExtension()
