"""ToMA in plain torch: selection, merge, forecast, plan. Only `patcher` knows ComfyUI."""
