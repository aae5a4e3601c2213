"""A run whose forecasts are wrong in the upper left corner, on purpose. Needs the fixture `comfy`."""

CORNER = 0.25  # of the height and of the width


def sampled():
    """A tiny SDXL, sampled once at 128 x 128 and recorded."""
    import builders
    import comfyui_toma.nodes.preview  # noqa: F401
    from comfyui_toma.toma_core.forecast import Forecast
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    right = Forecast.at

    def at(self, place):
        answer = right(self, place)
        rows, columns = (max(1, int(side * CORNER)) for side in answer.shape[-2:])
        answer[..., :rows, :columns] += 10 * answer.abs().mean()
        return answer

    Forecast.at = at
    try:
        model = patch(builders.tiny_sdxl(), Settings(ratio=0.0, tolerance=0.05), record=True)
        builders.sample(model, 128, 128, steps=6, cfg=1.0)
    finally:
        Forecast.at = right
    return model
