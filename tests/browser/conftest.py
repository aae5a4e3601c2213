"""What the browser tests share: one page, two renderers, and an eye on the console."""

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
DEMO_WEIGHTS = Path(__file__).parents[1] / "demo_pack" / "models" / "toma_demo_flux.safetensors"

if "COMFYUI_URL" in os.environ:
    # While working on the page: tests against a server that is already running.
    @pytest.fixture(scope="session")
    def server(tmp_path_factory):
        from comfy_server import ComfyServer

        return ComfyServer(tmp_path_factory.mktemp("server"), port=int(os.environ["COMFYUI_URL"].rsplit(":", 1)[1]))


@pytest.fixture(scope="session")
def canvas(page):
    from canvas import Canvas

    return Canvas(page)


@pytest.fixture(scope="module", params=["classic", "vue"])
def renderer(request, canvas):
    canvas.use_vue(request.param == "vue")
    yield request.param
    canvas.use_vue(False)


@pytest.fixture(scope="session")
def demo_weights():
    assert "COMFYUI_URL" in os.environ or DEMO_WEIGHTS.exists(), "the demo models are missing"


@pytest.fixture(autouse=True)
def no_error_of_the_pack(request):
    """Nothing in the console comes from this pack's files or speaks of its nodes."""
    if "page" not in request.fixturenames:
        yield
        return
    console, page = request.getfixturevalue("console"), request.getfixturevalue("page")
    console.clear()
    yield
    page.wait_for_timeout(100)
    said = [re.sub(r"\?template=\S+", "", line) for line in console]  # the page's own address names the pack
    ours = [line for line in said if "/extensions/ComfyUI-ToMA/" in line or "toma" in line.lower()]
    assert not ours, "\n".join(ours)


@pytest.fixture
def small_graph(canvas):
    """Loader, ToMA and sampler, ready to run; the ids of its nodes."""
    nodes = [
        {"id": "load", "type": "ToMADemoLoader", "pos": [0, 0]},
        {"id": "toma", "type": "ToMA", "pos": [300, 0]},
        {"id": "prompt", "type": "ToMADemoPrompt", "pos": [0, 250]},
        {"id": "size", "type": "ToMADemoLatent", "pos": [0, 450], "widgets": {"width": 64, "height": 64}},
        {"id": "sample", "type": "KSampler", "pos": [900, 0], "widgets": {"steps": 12, "cfg": 1}},
    ]
    links = [
        ("load", 0, "toma", "model"), ("toma", 0, "sample", "model"), ("prompt", 0, "sample", "positive"),
        ("prompt", 0, "sample", "negative"), ("size", 0, "sample", "latent_image"),
    ]  # fmt: skip
    return canvas.build(nodes, links)
