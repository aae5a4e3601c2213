"""What people do with a sped-up model: several samplers, other sizes, merging, saving, API prompts."""

import json
import logging
import os
import subprocess
import sys

import builders
import pytest
import torch
from calling import FORECAST, MERGED, node, says_what_it_did, told, toma
from composing import far

BOTH = {"ratio": 0.5, "tolerance": 0.3}
SETTINGS = pytest.mark.parametrize("settings", [FORECAST, MERGED, BOTH], ids=["forecast", "merged", "both"])
FAMILIES = pytest.mark.parametrize("name", ["flux", "sdxl"])


def conds(model) -> dict:
    return {"positive": builders.conditioning(model, 1), "negative": builders.conditioning(model, 2)}


# --------------------------------------------------------------------------- several samplers


@FAMILIES
@SETTINGS
def test_two_advanced_samplers_with_leftover_noise(bench, name, settings):
    """Each has its own history: the second half is what it is when run alone."""
    model = bench.models[name]

    def half(model, latent, start, end):
        first = start == 0
        about = {"add_noise": "enable" if first else "disable", "noise_seed": 5, "steps": 12, "cfg": 2.0}
        about |= {"sampler_name": "euler", "scheduler": "simple", "start_at_step": start, "end_at_step": end}
        about |= {"return_with_leftover_noise": "enable" if first else "disable"}
        return node("KSamplerAdvanced", model=model, latent_image=latent, **conds(model), **about)[0]

    empty = {"samples": builders.empty_latent(model)}
    patched = toma(model, **settings)
    middle = half(patched, empty, 0, 7)
    end = half(patched, middle, 7, 12)
    first, second = patched.model_options["toma"].reports
    assert (first.steps, second.steps) == (7, 5)
    assert second.evaluations[0].kind != "forecast" and first.counts != second.counts
    alone = toma(model, **settings)
    assert torch.equal(half(alone, middle, 7, 12)["samples"], end["samples"])
    assert told(alone).kinds == second.kinds
    says_what_it_did(first)
    says_what_it_did(second)
    if settings is FORECAST:
        plain = half(model, half(model, empty, 0, 7), 7, 12)
        assert far(end["samples"], plain["samples"]) < settings["tolerance"]


@FAMILIES
@SETTINGS
def test_custom_samplers_with_split_sigmas(bench, name, settings):
    model = bench.models[name]

    def half(model, noise, sigmas, latent):
        guider = node("CFGGuider", model=model, cfg=2.0, **conds(model))[0]
        sampler = node("KSamplerSelect", sampler_name="dpmpp_2m")[0]
        about = {"noise": noise, "guider": guider, "sampler": sampler, "sigmas": sigmas}
        return node("SamplerCustomAdvanced", latent_image=latent, **about)[0]

    sigmas = node("BasicScheduler", model=model, scheduler="simple", steps=12, denoise=1.0)[0]
    high, low = node("SplitSigmas", sigmas=sigmas, step=6)[:2]
    noise, none = node("RandomNoise", noise_seed=3)[0], node("DisableNoise")[0]
    patched, alone = toma(model, **settings), toma(model, **settings)
    middle = half(patched, noise, high, {"samples": builders.empty_latent(model)})
    end = half(patched, none, low, middle)
    assert torch.equal(half(alone, none, low, middle)["samples"], end["samples"])
    assert [report.steps for report in patched.model_options["toma"].reports] == [6, 6]
    for report in patched.model_options["toma"].reports:
        says_what_it_did(report)


@FAMILIES
@SETTINGS
def test_a_second_pass_at_another_size(bench, name, settings):
    """As a fresh run of that size, and the first pass again as before."""
    model = bench.models[name]
    patched = toma(model, **settings)
    run = {"steps": 10, "cfg": 2.0}
    first = builders.sample(patched, 128, 128, **run)
    larger = torch.nn.functional.interpolate(first, size=(24, 20), mode="bilinear")
    second = builders.sample(patched, latent=larger, denoise=0.6, **run)
    assert second.shape[-2:] == (24, 20) and told(patched).latent == (24, 20)
    assert torch.equal(second, builders.sample(toma(model, **settings), latent=larger, denoise=0.6, **run))
    assert torch.equal(first, builders.sample(patched, 128, 128, **run))


# --------------------------------------------------------------------------- several nodes


@FAMILIES
def test_toma_twice_in_a_row(bench, name, caplog):
    """The last one counts, and it is said once."""
    model, run = bench.models[name], {"steps": 8, "cfg": 2.0}
    with caplog.at_level(logging.INFO):
        twice = toma(toma(model, **MERGED), **FORECAST)
        out = builders.sample(twice, **run)
    assert sum("only the last one counts" in record.message for record in caplog.records) == 1
    assert sum(record.message.startswith("ToMA: ") for record in caplog.records) == 2, "one run, one line"
    assert torch.equal(out, builders.sample(toma(model, **FORECAST), **run))
    assert told(twice).counts["forecast"] and not told(twice).tokens


@FAMILIES
@pytest.mark.parametrize("toma_on", ["model1", "the merged"])
def test_merging_models(bench, name, toma_on):
    models, run = [bench.models[name], bench.others[name]], {"steps": 8, "cfg": 2.0}

    def merge(first, second):
        return node("ModelMergeSimple", model1=first, model2=second, ratio=0.6)[0]

    expected = builders.sample(toma(merge(*models), **FORECAST), **run)
    patched = merge(toma(models[0], **FORECAST), models[1])
    if toma_on == "the merged":
        patched = toma(merge(*models), **FORECAST)
    assert torch.equal(builders.sample(patched, **run), expected) and told(patched).counts["forecast"]
    assert far(expected, builders.sample(models[0], **run)) > 1e-3, "the other model has no say"


@FAMILIES
@pytest.mark.parametrize("saver", ["ModelSave", "CheckpointSave"])
def test_the_saved_file_is_the_plain_model(bench, comfy, name, saver):
    import comfy_extras.nodes_model_merging as merging
    from safetensors.torch import load_file

    def saved(model, prefix):
        about = {"filename_prefix": f"{saver}/{prefix}-{name}"}
        if saver == "ModelSave":
            node(saver, model=model, **about)
        else:  # what CheckpointSave does, without a text encoder and a VAE
            merging.save_checkpoint(model, output_dir=str(comfy.base / "output"), **about)
        (file,) = (comfy.base / "output" / saver).glob(f"{prefix}-{name}_*.safetensors")
        return load_file(file)

    model = bench.models[name]
    plain = saved(model, "plain")
    patched = toma(model, **MERGED)
    builders.sample(patched, steps=4, cfg=2.0)
    after = saved(patched, "toma")
    assert plain.keys() == after.keys() and plain
    assert all(torch.equal(plain[key], after[key]) for key in plain)


# --------------------------------------------------------------------------- prompts


def prompt(toma: dict, seed=0, model="flux", steps=6) -> dict:
    size = {"width": 64, "height": 64}
    sampler = {"seed": seed, "steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": ["2", 0], "positive": ["3", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    return {
        "1": {"class_type": "ToMADemoLoader", "inputs": {"name": model}},
        "2": {
            "class_type": "ToMA",
            "inputs": {"model": ["1", 0], **({"preset": "balanced"} if toma is None else toma)},
        },
        "3": {"class_type": "ToMADemoPrompt", "inputs": {"caption": "fox on blue", **size}},
        "4": {"class_type": "ToMADemoLatent", "inputs": {**size, "batch_size": 1}},
        "5": {"class_type": "KSampler", "inputs": {**sampler, **links}},
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 1]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "habits"}},
    }


def image(server, prompt: dict) -> bytes:
    from io import BytesIO

    from PIL import Image

    (saved,) = server.queue(prompt).outputs["7"]["images"]
    return Image.open(BytesIO(server.image(saved))).convert("RGB").tobytes()


def lines(server, start: int) -> list[str]:
    return [line for line in server.log[start:].splitlines() if "ToMA: flux, " in line or "ToMA: unet, " in line]


def test_only_the_preset_changes_between_queues(server):
    """Each queue is what it is on its own: with the others' outputs cached, and after others."""
    server.post("/free", {"unload_models": True, "free_memory": True})
    presets = ["paper", "turbo", "paper", "quality"]
    start, found = len(server.log), {}
    for preset in presets:
        found.setdefault(preset, []).append(image(server, prompt({"preset": preset}, steps=8)))
    assert len(lines(server, start)) == 4
    assert found["paper"][0] == found["paper"][1] and found["paper"][0] != found["turbo"][0]


def test_an_api_prompt_with_only_model_and_preset(server):
    """As older workflows and scripts have it: the other inputs get their defaults."""
    start = len(server.log)
    made = {name: image(server, prompt(widgets, seed=11)) for name, widgets in (
        ("both", {"preset": "balanced"}), ("custom", {"preset": "custom"}),
        ("more", {"preset": "balanced", "ratio": 0.9, "carry_detail": False}))}  # fmt: skip
    assert made["both"] == made["more"] and all(made.values())
    assert "Traceback" not in server.log[start:] and len(lines(server, start)) == 3


def test_who_brings_a_widget_of_the_first_version_is_told_once(server):
    said = "carry_detail has no effect any more, tolerance has taken its place"
    custom = {"preset": "custom", "ratio": 0.5}
    before = server.log.count(said)
    image(server, prompt({**custom, "carry_detail": False}, seed=21))
    assert server.log.count(said) == before
    for seed in (22, 23):
        image(server, prompt({**custom, "carry_detail": True}, seed=seed))
    assert server.log.count(said) == 1


def test_an_api_prompt_that_lacks_the_preset_is_refused_in_comfyuis_words(server):
    from comfy_server import PromptError

    start = len(server.log)
    with pytest.raises(PromptError) as refused:
        server.queue(prompt({}, seed=12))
    assert "required_input_missing" in json.dumps(refused.value.details)
    assert "Traceback" not in server.log[start:]


def test_a_prompt_queued_by_comfy_cli(server, tmp_path):
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(prompt({"preset": "balanced"}, seed=13)))
    start = len(server.log)
    command = [
        sys.executable,
        "-m",
        "comfy_cli",
        "--skip-prompt",
        "--no-enable-telemetry",
        "run",
        "--workflow",
        str(file),
    ]
    command += ["--host", "127.0.0.1", "--port", str(server.port), "--wait", "--timeout", "120"]
    env = {**os.environ, "HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines(server, start)) == 1
