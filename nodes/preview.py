"""The node `ToMAPreview`: which tokens were kept, as a picture."""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from pathlib import Path

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ..toma_core import overlay
from ..toma_core.patcher.report import Pick, Report
from .pictures import check_pictures
from .reports import made_by, reports_of

STYLES = ("kept tokens", "regions", "density")
_NOT_RECORDED = (
    "this run was made before the preview was connected, so its picks were not recorded: change the seed and run again."
)


class ToMAPreview(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMAPreview",
            display_name="ToMA Preview",
            category="model/patch",
            description="Shows which image tokens ToMA kept, at any step, on the picture they made.",
            search_aliases=["token merge preview", "kept tokens", "toma overlay"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model that was sampled with: what comes out of ToMA."),
                io.Image.Input("images", tooltip="The decoded pictures of that sampler."),
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
                    tooltip="kept tokens: dots on the darkened picture. regions: each group of merged tokens "
                    "in its mean colour. density: how many tokens each kept one stands for.",
                ),
            ],
            outputs=[
                io.Image.Output("overlay", tooltip="The picture with the picks drawn on it."),
                io.String.Output("statistics", tooltip="What the run did, counted."),
            ],
        )

    @classmethod
    def execute(cls, model, images: Tensor, step: int, blocks: str, style: str) -> io.NodeOutput:
        images = check_pictures(images, "images")
        if style not in STYLES:
            raise ValueError(f"style is {style!r}: it takes one of {', '.join(STYLES)}.")
        report, message = _report(reports_of(model, "model"), images, model)
        if report.picks:
            pick = _pick(report, step, blocks)
            drawn = torch.stack([_draw(style, image, pick, i) for i, image in enumerate(images)])
            if blocks not in ("", pick.group):
                message = f"This run has no blocks {blocks!r}. {message}"
            message = f"{_count(pick)} {message}".strip()
        else:
            drawn = images * 0.35
        shown = ui.PreviewImage(images, cls=cls).as_dict()["images"]
        page = {"images": shown, "picks": _save(report, message)}
        return io.NodeOutput(drawn, f"{message}\n{report.sentence()}", ui={"toma": [page]})


def _report(reports: list[Report], images: Tensor, model) -> tuple[Report, str]:
    """The latest run that fits the pictures, and what is to be said of it."""
    fitting = [report for report in reports if report.picks and _fits(report.picks[0], images)]
    if fitting:
        return made_by(fitting, images, model), ""
    latest = reports[-1]
    if latest.picks:
        height, width = latest.picks[0].grid
        shapes = f"{width}x{height} tokens, the picture is {images.shape[2]}x{images.shape[1]}"
        return latest, f"This is not the picture of the run, which had {shapes}: drawn stretched."
    if not latest.blocks_merged:
        reason = "".join(f" because {why}" for why in latest.unmerged_because[:1])
        return latest, f"No tokens were merged in this run{reason}."
    raise ValueError(f"model: {_NOT_RECORDED}")


def _fits(pick: Pick, images: Tensor) -> bool:
    """Whether a token grid has the pictures' shape, up to one token."""
    height, width = pick.grid
    return abs(width * images.shape[1] / images.shape[2] - height) <= 1


def _pick(report: Report, step: int, blocks: str) -> Pick:
    """The pick in force at a step counted from 1, or the first one if there was none yet. Of another model or
    size `blocks` may be left over: then those of the first group."""
    groups = [pick.group for pick in report.picks]
    picks = [pick for pick in report.picks if pick.group == (blocks if blocks in groups else groups[0])]
    until = [pick for pick in picks if not step or pick.step < step]
    return max(until or picks[:1], key=lambda pick: pick.step)


def _draw(style: str, image: Tensor, pick: Pick, number: int) -> Tensor:
    which = number % len(pick.kept)
    if style == "regions":
        return overlay.regions(image, pick.grid, pick.assignment[which])
    if style == "density":
        return overlay.density(image, pick.grid, pick.assignment[which])
    return overlay.kept_tokens(image, pick.grid, pick.kept[which])


def _count(pick: Pick) -> str:
    kept, tokens = pick.kept.shape[1], pick.assignment.shape[1]
    largest = max(int(rows.bincount().max()) for rows in pick.assignment)
    return (
        f"Blocks {pick.group}, chosen at step {pick.step + 1}: {kept} of {tokens} tokens kept "
        f"({kept / tokens:.0%}), the largest stands for {largest}."
    )


def _save(report: Report, message: str) -> dict:
    """All picks as a file for the page, which looks around in them without a new run."""
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
    recorded = {"steps": report.steps, "actions": report.at_step, "groups": groups, "picks": picks}
    name = f"toma_{uuid.uuid4().hex}.json"
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({**recorded, "message": message}), encoding="utf-8")
    return {"filename": name, "subfolder": "", "type": "temp"}


def _packed(numbers: Tensor) -> str:
    return b64encode(numbers.to(torch.int32).numpy().astype("<i4").tobytes()).decode()
