"""ToMAPreview on runs with forecast steps: where forecasts were wrong, for images and videos, and the run as data."""

import json
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def broken(comfy):
    import broken_forecast

    return broken_forecast.sampled()


def preview(model, images, **widgets):
    from comfyui_toma.nodes.preview import ToMAPreview

    output = ToMAPreview.execute(model, images, **{"step": 0, "blocks": "", "style": "forecast error", **widgets})
    return SimpleNamespace(image=output.args[0], text=output.args[1], json=output.args[2], page=output.ui["toma"][0])


def page_file(page: dict) -> dict:
    import folder_paths

    with open(folder_paths.get_temp_directory() + "/" + page["picks"]["filename"]) as file:
        return json.load(file)


def test_the_map_is_bright_where_the_forecast_was_broken_and_nowhere_else(broken):
    images = torch.full((1, 256, 256, 3), 0.2)
    drawn = preview(broken, images).image[0]
    corner, rest = drawn[:64, :64], drawn[:180, 80:]  # the legend is in the lower left
    assert corner.mean() > 2 * rest.mean()
    assert corner[..., 0].min() > rest[..., 0].max(), "red rises with the error"


def test_the_map_goes_with_the_step_and_the_page_gets_the_same(broken):
    report = broken.model_options["toma"].reports[-1]
    assert len(report.error_maps) > 1
    recorded = page_file(preview(broken, torch.rand(1, 128, 128, 3)).page)
    assert [one["step"] for one in recorded["errors"]] == [one.step for one in report.error_maps]
    for sent, own in zip(recorded["errors"], report.error_maps):
        assert sent["size"] == list(own.error.shape[1:])
        got = torch.frombuffer(bytearray(b64decode(sent["error"][0])), dtype=torch.uint8).view(sent["size"]) / 255
        assert (got * sent["most"] - own.error[0].clamp(max=sent["most"])).abs().max() <= sent["most"] / 254
    images = torch.rand(1, 128, 128, 3)
    first, last = report.error_maps[0].step + 1, report.error_maps[-1].step + 1
    assert preview(broken, images, step=first).text.startswith(f"Step {first}: a forecast would have been off by")
    assert preview(broken, images).text.startswith(f"Step {last}: ")
    assert not torch.equal(preview(broken, images, step=first).image, preview(broken, images).image)


def test_a_run_without_merged_tokens_shows_the_map_in_every_style_and_says_why(broken):
    images = torch.rand(1, 128, 128, 3)
    for style in ("kept tokens", "regions", "density"):
        shown = preview(broken, images, style=style)
        assert torch.equal(shown.image, preview(broken, images).image)
        assert "No tokens were merged: ratio is 0" in shown.text


def test_statistics_are_data_with_a_version(broken):
    report = broken.model_options["toma"].reports[-1]
    data = json.loads(preview(broken, torch.rand(1, 128, 128, 3)).json)
    assert data == json.loads(json.dumps(report.as_json())) and data["version"] == 1
    text = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text(encoding="utf-8")
    names = [*data, *data["evaluations"][0], *(f"speedup.{name}" for name in data["speedup"])]
    missing = [name for name in names if f"`{name}`" not in text and name not in ("speedup", "blocks")]
    assert not missing, "docs/statistics.md explains every field"
    numbers = [data["seconds"], data["seconds_per_step"], *data["speedup"].values()]
    numbers += [value for told in data["evaluations"] for value in told.values() if isinstance(value, float)]
    assert all(value is None or value == float(f"{value:.4g}") for value in numbers), "four digits, as documented"
    assert f"`version` is {data['version']}" in text
    assert [told["kind"] for told in data["evaluations"]] == report.kinds and data["summary"] == report.summary()


def test_a_run_that_was_not_recorded_says_so(comfy):
    import builders
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    model = patch(builders.tiny_sdxl(), Settings(ratio=0.0, tolerance=0.05))
    builders.sample(model, 64, 64, steps=4, cfg=1.0)
    images = torch.rand(1, 64, 64, 3)
    shown = preview(model, images)
    assert "before the preview was connected" in shown.text and "change the seed" in shown.text
    assert torch.equal(shown.image, images)


def test_a_recorded_run_without_a_map_is_shown(video):
    """Sound and video packed into one latent, or a history that starts anew at each step: there is no map to draw."""
    from comfyui_toma.nodes import preview as node
    from comfyui_toma.nodes.reports import NoRun, error_maps

    video.picks, video.error_maps[0].error, video.recorded = [], torch.zeros(1, 16), True
    assert not error_maps(video)
    model = SimpleNamespace(model=None, patches_uuid=None)
    report, message = node._report([video], torch.rand(1, 32, 32, 3), model)
    assert report is video and "connected" not in message
    video.recorded = False
    with pytest.raises(NoRun, match="change the seed"):
        node._report([video], torch.rand(1, 32, 32, 3), model)


def test_an_answer_that_is_no_number_is_drawn(video):
    video.error_maps[0].error[:] = float("nan")
    video.picks = []
    assert torch.isfinite(drawn_frames(video, "forecast error", range(9))).all()


@pytest.fixture
def video(comfy):
    """A video of 3 latent frames of 4 x 4, decoded to 9: frame t was wrong in row t, and keeps token t."""
    from comfyui_toma.toma_core.patcher.report import ErrorMap, Evaluated, Pick, Report
    from comfyui_toma.toma_core.settings import Settings

    error = torch.zeros(1, 3, 4, 4)
    for t in range(3):
        error[0, t, t] = 0.5
    report = Report("Wan", Settings(tolerance=0.03), blocks=2, steps=2, latent=(3, 4, 4), finished=True)
    report.evaluations = [Evaluated(0, 1.0, "full", "first"), Evaluated(1, 0.5, "merged", "second", 0.1, 2.0)]
    report.error_maps = [ErrorMap(1, error)]
    assignment = torch.arange(3).repeat_interleave(16)[None]
    report.picks = [Pick(1, "12x4", (12, 4), torch.tensor([[0, 17, 34]]), assignment)]
    return report


def drawn_frames(report, style: str, numbers) -> torch.Tensor:
    from comfyui_toma.nodes.preview import _drawn

    return _drawn(report, torch.full((9, 64, 64, 3), 0.2), numbers, 0, "", style)[0]


def test_each_frame_of_a_video_has_its_own_map(video):
    frames = drawn_frames(video, "forecast error", range(9))
    for number, frame in enumerate(frames):
        latent = -(-number // 4)  # 1 + 4 + 4 frames
        red = frame[:, 60, 0].reshape(4, 16).mean(1)
        assert int(red.argmax()) == latent, number
    assert drawn_frames(video, "forecast error", [8]).shape[0] == 1


def test_each_frame_of_a_video_has_its_own_tokens(video):
    from comfyui_toma.toma_core.overlay import DOT

    for number, token in ((0, 0), (4, 1), (8, 2)):
        frame = drawn_frames(video, "kept tokens", [number])[0]
        middles = frame[8::16, 8::16]
        dots = ((middles - torch.tensor(DOT)).abs().amax(-1) < 0.02).flatten().nonzero().flatten().tolist()
        assert dots == [token]


def test_long_videos_send_some_frames_with_both_ends(comfy):
    from comfyui_toma.nodes.images import shown_images

    assert shown_images(5) == [0, 1, 2, 3, 4]
    many = shown_images(121)
    assert len(many) == 32 and many[0] == 0 and many[-1] == 120 and many == sorted(set(many))
