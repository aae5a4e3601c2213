"""The node through the server's API, as the front end queues it, on the embedded demo models."""

from __future__ import annotations

import io

import pytest
from comfy_server import PromptError

CUSTOM = {
    "ratio": 0.5, "tile_size": "8", "reselect_every": 2, "reweight_every": 2, "start_percent": 0.0,
    "end_percent": 1.0, "merge": "whole block", "budget": "equal", "skip_first_blocks": -1, "carry_detail": True,
    "tolerance": 0.0,
}  # fmt: skip


def prompt(name: str, toma: dict | None, size: int = 64, seed: int = 1, steps: int = 4) -> dict:
    """Loader -> (ToMA ->) KSampler -> decode -> preview."""
    graph = {
        "1": {"class_type": "ToMADemoLoader", "inputs": {"name": name}},
        "2": {"class_type": "ToMADemoPrompt", "inputs": {"caption": "fox on blue", "width": size, "height": size}},
        "3": {"class_type": "ToMADemoPrompt", "inputs": {"caption": "", "width": size, "height": size}},
        "4": {"class_type": "ToMADemoLatent", "inputs": {"width": size, "height": size, "batch_size": 1}},
        "6": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["5" if toma else "1", 0], "positive": ["2", 0], "negative": ["3", 0],
                "latent_image": ["4", 0], "seed": seed, "steps": steps, "cfg": 2.5, "sampler_name": "euler",
                "scheduler": "simple", "denoise": 1.0,
            },
        },
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 1]}},
        "8": {"class_type": "PreviewImage", "inputs": {"images": ["7", 0]}},
    }  # fmt: skip
    if toma:
        graph["5"] = {
            "class_type": "ToMA",
            "inputs": {"model": ["1", 0], "preset": "custom", **CUSTOM, **toma},
        }
    return graph


def picture(server, graph: dict):
    import numpy as np
    from PIL import Image

    done = server.queue(graph)
    image = Image.open(io.BytesIO(server.image(done.outputs["8"]["images"][0])))
    return np.asarray(image.convert("RGB"), dtype=float)


@pytest.mark.parametrize("name", ["flux", "sdxl-like unet"])
def test_merged_run_is_near_the_unmerged_one_and_says_what_it_did(server, name):
    import numpy as np

    before = picture(server, prompt(name, None))
    assert before.std() > 5
    errors = []
    for ratio in (0.25, 0.75):
        logged = len(server.log)
        after = picture(server, prompt(name, {"ratio": ratio}))
        errors.append(float(np.square(after - before).mean()))
        lines = [line for line in server.log[logged:].splitlines() if "ToMA:" in line and "steps" in line]
        kept = round(256 * (1 - ratio))
        assert len(lines) == 1 and f"256 -> {kept}" in lines[0] and "attention: pytorch" in lines[0], lines
    assert 0 < errors[0] < errors[1] < 64**2, errors  # three of four tokens merged at every step but the first
    assert (picture(server, prompt(name, None)) == before).all()


def test_ratio_zero_is_the_unmerged_picture(server):
    assert (
        picture(server, prompt("flux", {"ratio": 0.0}, seed=3)) == picture(server, prompt("flux", None, seed=3))
    ).all()


@pytest.mark.parametrize(
    "wrong,told",
    [
        ({"start_percent": 0.8, "end_percent": 0.2}, "start_percent"),
        ({"end_percent": 1.5}, "end_percent"),
        ({"ratio": 0.96}, "ratio"),
        ({"ratio": "many"}, "ratio"),
        ({"tile_size": "5"}, "tile_size"),
        ({"reselect_every": 0}, "reselect_every"),
        ({"tolerance": 1.5}, "tolerance"),
        ({"tolerance": "little"}, "tolerance"),
        ({"merge": "everything"}, "merge"),
        ({"preset": "best"}, "preset"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(server, wrong, told):
    with pytest.raises(PromptError) as refused:
        server.queue(prompt("flux", wrong))
    errors = refused.value.details["node_errors"]["5"]["errors"]
    assert told in str(errors), errors


@pytest.mark.parametrize("name", ["flux", "sdxl-like unet"])
def test_missing_optional_widgets_are_the_defaults(server, name):
    """As in prompts by the API, and in those of earlier versions, which know no tolerance."""
    graph = prompt(name, {"preset": "balanced"}, steps=8)
    whole = picture(server, graph)
    graph["5"]["inputs"] = {"model": ["1", 0], "preset": "balanced"}
    assert (picture(server, graph) == whole).all()
    graph["5"]["inputs"] = {"model": ["1", 0], "preset": "custom"}
    assert picture(server, graph).std() > 5
