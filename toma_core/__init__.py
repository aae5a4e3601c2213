"""ToMA in plain torch: tiles, selection, merge, schedule. Knows nothing of ComfyUI."""
