"""ToMAPreview and ToMACompare in process, on tiny models: what they draw, count and say."""

import json

import pytest
import torch


@pytest.fixture(scope="module")
def pack(comfy):
    import comfyui_toma
    import comfyui_toma.nodes.compare
    import comfyui_toma.nodes.preview

    return comfyui_toma


@pytest.fixture(scope="module")
def sampled(pack, comfy):
    """A tiny SDXL with ToMA and recording, sampled once with a batch of 3 at 128x64."""
    import builders

    model = merged(pack, builders.tiny_sdxl(), record=True, reselect_every=2)
    builders.sample(model, 128, 64, batch=3, steps=4)
    return model


def merged(pack, model, record=False, **settings):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    return patch(model, Settings(tile_size=4, **settings), record)


def preview(model, images, step=0, blocks="", style="kept tokens", frame=0):
    from comfyui_toma.nodes.preview import ToMAPreview

    output = ToMAPreview.execute(model, images, step, blocks, style, frame)
    return output.args[0], output.args[1], output.ui["toma"][0]


def dots(picture, grid) -> int:
    """Kept tokens counted in the picture: cells whose middle has the colour of a dot."""
    from comfyui_toma.toma_core.overlay import DOT

    (height, width), (rows, columns) = picture.shape[:2], grid
    y = ((torch.arange(rows) + 0.5) * height / rows).long()
    x = ((torch.arange(columns) + 0.5) * width / columns).long()
    middles = picture[y[:, None], x[None]]
    return int(((middles - torch.tensor(DOT)).abs().amax(-1) < 0.02).sum())


def test_dots_in_the_picture_are_the_kept_tokens_of_the_statistics(sampled):
    images = torch.rand(3, 512, 1024, 3) * 0.5
    picture, text, page = preview(sampled, images, step=1)
    pick = sampled.model_options["toma"].reports[-1].picks[0]
    assert picture.shape == images.shape
    assert [dots(one, pick.grid) for one in picture] == [pick.kept.shape[1]] * 3
    assert f"{pick.kept.shape[1]} of {pick.assignment.shape[1]} tokens kept" in text
    most = max(rows.unique(return_counts=True)[1].max() for rows in pick.assignment)
    assert f"the largest stands for {most}." in text
    assert len(page["images"]) == 3


def test_page_gets_every_pick_as_it_was(sampled):
    import folder_paths

    _, _, page = preview(sampled, torch.rand(3, 64, 128, 3))
    with open(folder_paths.get_temp_directory() + "/" + page["picks"]["filename"]) as file:
        recorded = json.load(file)
    picks = sampled.model_options["toma"].reports[-1].picks
    assert len(recorded["picks"]) == len(picks)
    from base64 import b64decode

    for sent, pick in zip(recorded["picks"], picks):
        assert (sent["step"], sent["group"], tuple(sent["grid"])) == (pick.step, pick.group, tuple(pick.grid))
        for image in range(3):
            kept = torch.frombuffer(bytearray(b64decode(sent["kept"][image])), dtype=torch.int32)
            assert torch.equal(kept.long(), pick.kept[image].long())


def test_step_and_blocks_choose_the_pick(sampled):
    images = torch.rand(3, 512, 1024, 3) * 0.5
    picks = sampled.model_options["toma"].reports[-1].picks
    groups = sorted({pick.group for pick in picks})
    assert len(groups) == 2
    assert "chosen at step 1:" in preview(sampled, images, step=2)[1]
    assert "chosen at step 3:" in preview(sampled, images, step=3)[1]
    assert "chosen at step 3:" in preview(sampled, images)[1]
    for group in groups:
        assert f"Blocks {group}," in preview(sampled, images, blocks=group)[1]
    text = preview(sampled, images, blocks="99x99")[1]  # left over from another size
    assert f"Blocks {picks[0].group}," in text and "has no blocks '99x99'" in text


def test_regions_drawn_are_the_regions_picked(pack):
    """A picture of four flat quarters, merged into one token each: filled with the quarters' colours."""
    from comfyui_toma.nodes.preview import _draw
    from comfyui_toma.toma_core.patcher.report import Pick

    colours = torch.tensor([[[0.8, 0.1, 0.1], [0.1, 0.6, 0.1]], [[0.1, 0.1, 0.7], [0.5, 0.5, 0.1]]])
    picture = colours.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assignment = torch.tensor([[0, 1], [2, 3]]).repeat_interleave(4, 0).repeat_interleave(4, 1).reshape(1, 64)
    pick = Pick(0, "8x8", (8, 8), torch.tensor([[9, 13, 41, 45]]), assignment)
    drawn = _draw("regions", picture + 0.05 * torch.rand(256, 256, 1), pick, 0)
    for row in range(2):
        for column in range(2):
            inside = drawn[row * 128 + 16 : row * 128 + 112, column * 128 + 16 : column * 128 + 112]
            assert inside.std((0, 1)).max() < 1e-5, "a region has one colour and no line inside"
            assert (inside[0, 0] - colours[row, column]).abs().max() < 0.06
    assert (drawn[60, 124:132] - drawn[60, 100]).abs().max() > 0.1, "a line between two regions"


def test_never_ran_and_plain_models_say_which_input_and_what_to_do(pack, sampled):
    import builders
    from comfyui_toma.nodes.compare import ToMACompare

    images = torch.rand(1, 64, 64, 3)
    plain = builders.tiny_sdxl()
    for model, why in ((plain, "model has no ToMA"), (merged(pack, plain, record=True), "model was not sampled")):
        picture, text, page = preview(model, images)
        assert text.startswith(why) and torch.equal(picture, images), "a bypassed ToMA must not end the prompt"
        assert page_file(page)["message"] == text
    told = ToMACompare.execute(images, images, reference_model=plain, image_model=sampled).args
    assert told[6] != told[6], "no speed-up"
    assert "reference_model has no ToMA" in told[7] and "ratio 0 and tolerance 0" in told[7]


def test_another_size_is_drawn_and_said(sampled):
    picture, text, _ = preview(sampled, torch.rand(1, 256, 256, 3))
    assert picture.shape == (1, 256, 256, 3)
    assert "not the image of the run" in text


def test_unmerged_run_is_darkened_and_said(pack):
    import builders

    model = merged(pack, builders.tiny_sdxl(), record=True, ratio=0.0)
    builders.sample(model, 64, 64, steps=2)
    images = torch.rand(1, 64, 64, 3)
    picture, text, page = preview(model, images)
    assert "No tokens were merged: ratio is 0" in text
    assert torch.allclose(picture, images * 0.35)


def test_run_before_the_preview_was_connected_says_so(pack):
    import builders

    model = merged(pack, builders.tiny_sdxl())
    builders.sample(model, 64, 64, steps=2)
    images = torch.rand(1, 64, 64, 3)
    picture, text, _ = preview(model, images)
    assert "before the preview was connected" in text and "change the seed" in text and torch.equal(picture, images)


def test_second_pass_is_told_from_the_first_by_its_shape(pack):
    import builders

    model = merged(pack, builders.tiny_sdxl(), record=True, reselect_every=1)
    builders.sample(model, 64, 64, steps=2)
    builders.sample(model, 128, 64, steps=2)
    reports = model.model_options["toma"].reports
    for report, size in zip(reports, ((64, 64), (64, 128))):
        text = preview(model, torch.rand(1, *size, 3))[1]
        assert report.sentence() in text and "stretched" not in text


def test_second_pass_is_told_from_the_first_by_its_size(pack):
    import builders

    model = merged(pack, builders.tiny_sdxl(), record=True, reselect_every=1)
    for side in (64, 128):
        builders.sample(model, side, side, steps=2)
    small, large = model.model_options["toma"].reports
    for report, side in ((small, 64), (large, 128), (large, 96)):  # 96: scaled after, so the latest
        pictures = torch.rand(1, side, side, 3)
        grid = "x".join(map(str, report.picks[0].grid))
        assert f"Blocks {grid}," in preview(model, pictures)[1]
        seconds = compare(pictures, pictures, reference_model=model, image_model=model).args[4]
        assert seconds == report.seconds_per_step


def test_branches_with_loras_of_their_own_have_runs_of_their_own(pack):
    """One ToMA, two LoRAs behind it, two samplers at one size: each preview shows its own sampler's run."""
    import builders

    model = merged(pack, builders.tiny_sdxl(), record=True)
    branches = [model.clone(), model.clone()]
    name = next(key for key in model.model.state_dict() if key.endswith("proj_in.weight"))
    for branch, steps in zip(branches, (5, 3)):
        branch.add_patches({name: (0.1 * steps * torch.ones_like(model.model.state_dict()[name]),)})
        builders.sample(branch, 64, 64, steps=steps)
    for branch, steps in zip(branches, (5, 3)):
        assert f"{steps} steps: " in preview(branch, torch.rand(1, 64, 64, 3))[1]
    assert "3 steps: " in preview(model, torch.rand(1, 64, 64, 3))[1], "in front of the LoRAs: the latest"


def test_page_knows_what_each_step_was(pack):
    """With a cache that answers at every other step, what happened has to stay at its step."""
    import builders
    from comfy.patcher_extension import WrappersMP

    model, seen = builders.tiny_sdxl().clone(), []

    def every_other(executor, *args, **kwargs):
        seen.append(seen[-1] if len(seen) % 2 else executor(*args, **kwargs))
        return seen[-1]

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "cache", every_other)
    model = merged(pack, model, record=True, reselect_every=2, end_percent=0.75)
    builders.sample(model, 64, 64, steps=8, cfg=1.0)
    recorded = page_file(preview(model, torch.rand(1, 64, 64, 3))[2])
    report = model.model_options["toma"].reports[-1]
    assert [row[:3] for row in recorded["evaluations"]] == [[e.step, e.kind, e.why] for e in report.evaluations]
    assert [row[0] for row in recorded["evaluations"]] == list(range(8))
    assert "another node answered" in recorded["evaluations"][1][2]


def page_file(page: dict) -> dict:
    import folder_paths

    with open(folder_paths.get_temp_directory() + "/" + page["picks"]["filename"]) as file:
        return json.load(file)


def compare(*args, **inputs):
    from comfyui_toma.nodes.compare import ToMACompare

    return ToMACompare.execute(*args, **inputs)


def test_compare_counts_and_sums_up(pack, sampled):
    images = torch.rand(2, 64, 96, 3)
    same = compare(images, images)
    picture, psnr, ssim, distance, before, after, speedup, text = same.args
    assert psnr == float("inf") and abs(ssim - 1) < 1e-6
    assert distance != distance and speedup != speedup
    assert text == "The images are equal (SSIM 1)."
    noisy = (images + 0.1 * torch.randn_like(images)).clamp(0, 1)
    picture, psnr, ssim, *_, text = compare(images, noisy, reference_model=sampled, image_model=sampled).args
    assert picture.shape[0] == 2 and picture.shape[2] > 3 * 96
    assert 15 < psnr < 25 and 0 < ssim < 1
    assert f"PSNR {psnr:.1f} dB" in text and "as fast" in text and "s/step" in text
    with pytest.raises(ValueError, match="only images of the same size"):
        compare(images, images[:, :32])


@pytest.mark.parametrize("kind", ["clip", "dinov2", "dinov3"])
def test_embedding_distance_with_each_encoder(pack, kind):
    encoder = tiny_encoder(kind)
    images = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    assert abs(compare(images, images, clip_vision=encoder).args[3]) < 1e-5
    other = compare(images, 1 - images, clip_vision=encoder).args
    assert other[3] > 1e-5 and "embedding distance" in other[-1]


def tiny_encoder(kind: str):
    """ComfyUI's own CLIP_VISION with a small random encoder."""
    import comfy.clip_vision

    common = {
        "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128,
        "image_size": 56, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    more = {
        "clip": {"model_type": "clip_vision_model", "projection_dim": 32},
        "dinov2": {
            "model_type": "dinov2",
            "use_swiglu_ffn": False,
            "image_size": 518,
        },  # older releases know no other
        "dinov3": {},
    }[kind]
    if kind == "dinov3":
        dino3 = pytest.importorskip("comfy.image_encoders.dino3", reason="this release has no DINOv3")
        more = {**dino3.DINOV3_VITH_CONFIG, **common, "patch_size": 14}
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**common, **more}, file)
        file.flush()
        encoder = comfy.clip_vision.ClipVisionModel(file.name if kind != "dinov3" else {**common, **more})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in encoder.model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.1 if weight.ndim > 3 else 0.3))
            weight.requires_grad_(False)
    return encoder
