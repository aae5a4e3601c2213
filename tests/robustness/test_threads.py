"""ComfyUI's multi-GPU sampling calls deep clones of the model, one thread a device: state must not mix."""

import threading

import builders
import pytest
import torch
from composing import small_sdxl

RUN = {"width": 128, "height": 128, "steps": 4, "cfg": 2.0}
ROUNDS = 3


def merged(model, **settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    return patch(model, Settings(**{"reselect_every": 2, "skip_first_blocks": 0, **settings}))


def deep_clone(patched):
    """ComfyUI's own copy for another device, here the same one: weights of its own, loaded anew."""
    if not hasattr(patched, "deepclone_multigpu"):
        pytest.skip("this release has no multi-GPU sampling")
    if patched.cached_patcher_init is None:
        patched.cached_patcher_init = (small_sdxl, ())
    return patched.deepclone_multigpu()


def test_a_deep_clones_seams_call_its_own_blocks(bench, monkeypatch):
    """Each network's forwards are wrapped where it is, and put back."""
    from comfyui_toma.toma_core.patcher.merging import Merging

    first = merged(bench.models["sdxl"], merge="each layer")
    second = deep_clone(first)
    wrap, wrapped = Merging._wrap, []

    def watched(self, network):
        wrap(self, network)
        block = network.middle_block[1].transformer_blocks[0]
        wrapped.append((id(network), block.__dict__["forward"].original.module is block))

    monkeypatch.setattr(Merging, "_wrap", watched)
    for patched in (first, second):
        builders.sample(patched, **{**RUN, "steps": 1})
        network = patched.model.diffusion_model
        assert {found for found, _ in wrapped} == {id(network)} and all(mine for _, mine in wrapped)
        assert "forward" not in network.middle_block[1].transformer_blocks[0].__dict__
        wrapped.clear()


@pytest.mark.parametrize("merge,tolerance", [("whole block", 0.0), ("whole block", 0.9), ("each layer", 0.0)])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_two_threads(bench, figure, monkeypatch, name, merge, tolerance):
    """Each thread gets what it gets alone, though both run at once and from one patched model."""
    import comfy.sample

    draw, one_at_a_time = comfy.sample.prepare_noise, threading.Lock()

    def prepare_noise(*args, **kwargs):
        with one_at_a_time:  # ComfyUI seeds torch's one generator and then draws from it
            return draw(*args, **kwargs)

    monkeypatch.setattr(comfy.sample, "prepare_noise", prepare_noise)
    first = merged(bench.models[name], merge=merge, tolerance=tolerance)
    second = deep_clone(first)
    runs = [(first, {**RUN, "seed": 1}), (second, {**RUN, "seed": 2, "width": 96})]
    alone = [builders.sample(patched, **run) for patched, run in runs]
    results: list[list] = [[], []]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        patched, run = runs[index]
        start.wait()
        try:
            for _ in range(ROUNDS):
                results[index].append(network_calls(patched, run))
        except BaseException as error:  # noqa: BLE001 - a thread can't fail the test by itself
            results[index].append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        for result in results[index]:
            assert not isinstance(result, BaseException), result
            assert torch.equal(result, alone[index])
    figure("threads", "two at once on deep clones, each as if alone")


def network_calls(patched, run):
    with torch.inference_mode():
        return builders.sample(patched, **run)
