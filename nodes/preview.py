"""The node `ToMAPreview`: which tokens were kept and where forecasts were wrong, drawn on the image."""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from math import ceil
from pathlib import Path

import torch
from comfy_api.latest import io
from torch import Tensor

from ..toma_core import overlay
from ..toma_core.patcher.report import ErrorMap, Pick, Report
from ..toma_core.settings import Settings
from .images import as_files, check_images, shown_images
from .live import told
from .reports import NoRun, error_maps, fits, made_by, reports_of, why_unmerged

ERROR = "forecast error"
STYLES = ("kept tokens", "regions", "density", ERROR)
_NOT_RECORDED = (
    "this run was made before the preview was connected, so nothing of it was recorded: change the seed and run again."
)


class ToMAPreview(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMAPreview",
            display_name="ToMA Preview",
            category="model/patch",
            description="Shows on the image, at any step, which image tokens ToMA kept and where its forecasts were "
            "wrong.",
            search_aliases=["kept tokens", "toma overlay", "forecast error", "statistics"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model that was sampled with: what comes out of ToMA."),
                io.Image.Input("images", tooltip="The decoded images of that sampler."),
                io.Int.Input(
                    "step",
                    default=0,
                    min=0,
                    max=10000,
                    tooltip="The sampler step to look at, counted from 1. 0: the last one.",
                ),
                io.String.Input(
                    "blocks",
                    default="",
                    tooltip="The group of blocks to look at, as the switch below names it: a token grid such "
                    "as 64x64, or double or single. Empty: the first.",
                ),
                io.Combo.Input(
                    "style",
                    options=list(STYLES),
                    tooltip="kept tokens: dots on the darkened image. regions: each group of merged tokens in its mean "
                    "colour. density: how many tokens each kept one stands for. forecast error: where the forecast was "
                    "wrong at the last step that was computed.",
                ),
                io.Int.Input(
                    "frame",
                    default=0,
                    min=0,
                    max=10000,
                    optional=True,
                    tooltip="The frame of a video, or the image of a batch, to look at, counted from 1. 0: all.",
                ),
            ],
            outputs=[
                io.Image.Output("overlay", tooltip="The images with what was chosen in `style` drawn on them."),
                io.String.Output("statistics", tooltip="What the run did, counted, as text."),
                io.String.Output(
                    "statistics_json", tooltip="The same as JSON, for other nodes and scripts: see docs/statistics.md."
                ),
            ],
        )

    @classmethod
    def execute(cls, model, images: Tensor, step: int, blocks: str, style: str, frame: int = 0) -> io.NodeOutput:
        images = check_images(images, "images")
        if style not in STYLES:
            raise ValueError(f"style is {style!r}: it takes one of {', '.join(STYLES)}.")
        shown = shown_images(len(images))
        try:
            report, message = _report(reports_of(model, "model"), images, model)
        except NoRun as why:
            none = Report("", Settings(ratio=0.0), blocks=0, notes=[str(why)])
            page = {"images": as_files(images[shown], cls), "picks": _save(none, str(why), shown)}
            return io.NodeOutput(images, str(why), json.dumps(none.as_json()), ui={"toma": [page]})
        numbers = range(len(images)) if frame <= 0 else [min(frame, len(images)) - 1]
        drawn, about = _drawn(report, images, numbers, step, blocks, style)
        message = " ".join(part for part in (*about, message) if part)
        page = {"images": as_files(images[shown], cls), "picks": _save(report, message, shown)}
        text = json.dumps(report.as_json())
        return io.NodeOutput(drawn, f"{message}\n{report.sentence()}", text, ui={"toma": [page]})


def _report(reports: list[Report], images: Tensor, model) -> tuple[Report, str]:
    """The latest run that fits the images, and what is to be said of it."""
    fitting = [report for report in reports if fits(report, images)]
    report = made_by(fitting or reports, images, model)
    computed = [kind for kind in report.kinds if kind != "forecast"]
    recordable = report.blocks_merged or (report.settings.tolerance and len(computed) > 1)
    if recordable and not report.recorded:
        raise NoRun(f"model: {_NOT_RECORDED}")
    if fitting:
        return report, ""
    latent = "x".join(map(str, reversed(report.latent[-2:])))
    shapes = f"a latent of {latent}, the image is {images.shape[2]}x{images.shape[1]}"
    return report, f"This is not the image of the run, which had {shapes}: drawn stretched."


def _drawn(
    report: Report, images: Tensor, numbers, step: int, blocks: str, style: str
) -> tuple[Tensor, tuple[str, ...]]:
    """The images of those numbers with what was asked for, or with what there is; and what has to be said."""
    shown, frames = [images[number] for number in numbers], _frames(report)
    reason = "" if report.picks else why_unmerged(report)
    maps = error_maps(report)
    if maps and (style == ERROR or not report.picks):
        found = at_step(maps, step)
        places = [_place(number, len(images), len(found.error), frames) for number in numbers]
        most = _scale(found.error)
        drawn = [overlay.forecast_error(i, found.error[b, min(t, found.error.shape[1] - 1)], most)
                 for i, (b, t) in zip(shown, places)]  # fmt: skip
        return torch.stack(drawn), (_off(report, found), reason)
    if report.picks:
        pick = _pick(report, step, blocks)
        places = [_place(number, len(images), len(pick.kept), frames) for number in numbers]
        drawn = [_draw(style, image, pick, *place, frames) for image, place in zip(shown, places)]
        other = "" if blocks in ("", pick.group) else f"This run has no blocks {blocks!r}."
        unforecast = "Nothing is forecast in this run." if style == ERROR else ""
        return torch.stack(drawn), (_count(pick), other, unforecast)
    return torch.stack(shown) * 0.35, (reason,)


def _frames(report: Report) -> int:
    """The frames of a video's latent [.., T, H, W]; an image has one."""
    return report.latent[0] if len(report.latent) == 3 else 1


def _place(number: int, count: int, batch: int, frames: int) -> tuple[int, int]:
    """Of the image `number` of `count`: which of the batch's latents it is of, and which frame of that. The first frame
    of a video's latent is one image, the others are several each."""
    if frames == 1:
        return number % batch, 0
    each = max(1, count // batch)
    return min(number // each, batch - 1), ceil((number % each) * (frames - 1) / max(1, each - 1))


def at_step(found: list, step: int):
    """The last of them up to a step counted from 1 (0: of all), or the first if there was none yet."""
    until = [one for one in found if not step or one.step < step]
    return max(until, key=lambda one: one.step) if until else found[0]


def _pick(report: Report, step: int, blocks: str) -> Pick:
    """The pick in force at a step. `blocks` may be left over from another model: then those of the first group."""
    groups = [pick.group for pick in report.picks]
    return at_step([pick for pick in report.picks if pick.group == (blocks if blocks in groups else groups[0])], step)


def _draw(style: str, image: Tensor, pick: Pick, which: int, frame: int = 0, frames: int = 1) -> Tensor:
    """One image; the token grid of a video has its frames one below the other."""
    (rows, columns), kept, assignment = pick.grid, pick.kept[which].long(), pick.assignment[which].long()
    frames = frames if rows % frames == 0 else 1
    rows, first = rows // frames, min(frame, frames - 1) * (rows // frames) * columns
    here = slice(first, first + rows * columns)
    if style == "regions":
        return overlay.regions(image, (rows, columns), assignment[here].unique(return_inverse=True)[1])
    if style == "density":
        return overlay.density(image, (rows, columns), assignment[here], assignment.bincount())
    inside = (kept >= here.start) & (kept < here.stop)
    return overlay.kept_tokens(image, (rows, columns), kept[inside] - first)


def _count(pick: Pick) -> str:
    kept, tokens = pick.kept.shape[1], pick.assignment.shape[1]
    largest = max(int(rows.bincount().max()) for rows in pick.assignment)
    return (
        f"Blocks {pick.group}, chosen at step {pick.step + 1}: {kept} of {tokens} tokens kept "
        f"({kept / tokens:.0%}), the largest stands for {largest}."
    )


def _off(report: Report, found: ErrorMap) -> str:
    """How far off the forecast was where the map was taken."""
    graded = [e for e in report.evaluations if e.step == found.step and e.off is not None]
    times = f", {graded[-1].off:.2g} times the tolerance" if graded else ""
    mean, most = float(found.error.mean()), float(found.error.max())
    return (
        f"Step {found.step + 1}: a forecast would have been off by {mean:.1%}{times}, where it is worst by {most:.0%}."
    )


def _save(report: Report, message: str, shown: list[int]) -> dict:
    """All picks and error maps as a file for the page, which looks around in them without a new run."""
    import folder_paths

    picks = [
        {
            "step": pick.step,
            "group": pick.group,
            "grid": pick.grid,
            "kept": [_packed(kept) for kept in pick.kept],
            "assignment": [_packed(assignment) for assignment in pick.assignment],
        }
        for pick in report.picks
    ]
    groups = list(dict.fromkeys(pick.group for pick in report.picks))
    recorded = {"frames": _frames(report), "groups": groups, "picks": picks, "images": shown, **told(report)}
    reason = "" if report.picks else why_unmerged(report)
    recorded["errors"] = [_error(found) for found in error_maps(report)]
    name = f"toma_{uuid.uuid4().hex}.json"
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({**recorded, "message": message, "reason": reason}), encoding="utf-8")
    return {"filename": name, "subfolder": "", "type": "temp"}


def _packed(numbers: Tensor) -> str:
    return b64encode(numbers.to(torch.int32).numpy().astype("<i4").tobytes()).decode()


def _scale(error: Tensor) -> float:
    """Where the colours end: single cells that stick out must not take them from all others."""
    values = error.flatten()
    return float(values.kthvalue(max(1, round(0.995 * len(values)))).values)


def _error(found: ErrorMap) -> dict:
    """A map [B, T, H, W] as bytes, 255 standing for `most` and more."""
    error, most = found.error, _scale(found.error)
    parts = (error / max(most, 1e-20) * 255).clamp(0, 255).round().to(torch.uint8)
    packed = [b64encode(part.numpy().tobytes()).decode() for part in parts]
    return {"step": found.step, "size": list(error.shape[1:]), "most": most, "error": packed}
