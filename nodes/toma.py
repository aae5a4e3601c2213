"""The node `ToMA`: a MODEL goes in, a faster MODEL comes out."""

from __future__ import annotations

from dataclasses import asdict

from comfy_api.latest import io

from ..toma_core.patcher import family_of, patch
from ..toma_core.settings import (
    BUDGETS,
    CUSTOM,
    PRESETS,
    TILE_SIZES,
    MergeWhere,
    Settings,
    SettingsError,
    resolve,
)
from .live import LivePicks
from .running import has_preview, running_prompt

_CUSTOM_ONLY = " Counts with the preset 'custom'."
_PRESET = "balanced"
_SHOWN = PRESETS[_PRESET]["unet"]


def _presets_for_page() -> dict:
    """PRESETS as the widgets hold them, for the front end to show."""

    def widgets(settings: Settings) -> dict:
        return {**asdict(settings), "tile_size": str(settings.tile_size), "merge": settings.merge.value}

    return {name: {f: widgets(s) for f, s in families.items()} for name, families in PRESETS.items()}


class ToMA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMA",
            display_name="ToMA (Token Merging)",
            category="model/patch",
            description="Makes SDXL and Flux sample faster by computing alike image tokens together. "
            "Put it between the model loader and the sampler.",
            search_aliases=["token merge", "tome", "speed", "faster", "accelerate"],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster: SDXL and its relatives, or Flux."),
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default=_PRESET,
                    tooltip="How much speed for how much likeness. quality: closest to the unmerged picture. "
                    "balanced: a good default. fast: drafts. paper: the published ToMA settings. "
                    "custom: the values below.",
                    extra_dict={"presets": _presets_for_page()},
                ),
                io.Float.Input(
                    "ratio",
                    default=_SHOWN.ratio,
                    min=0.0,
                    max=0.95,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="Share of the image tokens that is merged away: 0.5 computes half of them. "
                    "More is faster and less faithful; 0 changes nothing and only measures." + _CUSTOM_ONLY,
                ),
                io.Combo.Input(
                    "tile_size",
                    options=[str(size) for size in TILE_SIZES],
                    default=str(_SHOWN.tile_size),
                    tooltip="Tokens are compared within tiles of this many tokens a side. Small tiles are "
                    "quick and keep structure; 0 compares the whole image and is slow." + _CUSTOM_ONLY,
                ),
                io.Int.Input(
                    "reselect_every",
                    default=_SHOWN.reselect_every,
                    min=1,
                    max=100,
                    tooltip="Choose the tokens to keep anew after this many sampler steps." + _CUSTOM_ONLY,
                ),
                io.Int.Input(
                    "reweight_every",
                    default=_SHOWN.reweight_every,
                    min=1,
                    max=100,
                    tooltip="Between two choices, work out anew after this many steps which token is merged "
                    "into which." + _CUSTOM_ONLY,
                ),
                io.Float.Input(
                    "start_percent",
                    default=_SHOWN.start_percent,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Merge from this part of the sampler's steps on." + _CUSTOM_ONLY,
                ),
                io.Float.Input(
                    "end_percent",
                    default=_SHOWN.end_percent,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Merge up to this part of the sampler's steps; the rest runs unmerged."
                    + _CUSTOM_ONLY,
                ),
                io.Combo.Input(
                    "merge",
                    options=[where.value for where in MergeWhere],
                    default=_SHOWN.merge.value,
                    advanced=True,
                    tooltip="What runs on merged tokens: the whole transformer block (fastest), each of its "
                    "layers on its own (as published; on Flux the same as the whole block), or attention "
                    "only." + _CUSTOM_ONLY,
                ),
                io.Combo.Input(
                    "budget",
                    options=list(BUDGETS),
                    default=_SHOWN.budget,
                    advanced=True,
                    tooltip="equal: every tile keeps as many tokens. adaptive: tiles with more detail keep "
                    "more." + _CUSTOM_ONLY,
                ),
                io.Int.Input(
                    "skip_first_blocks",
                    default=_SHOWN.skip_first_blocks,
                    min=-1,
                    max=100,
                    advanced=True,
                    tooltip="Leave this many first blocks unmerged. -1: what is best for the model."
                    + _CUSTOM_ONLY,
                ),
                io.Boolean.Input(
                    "carry_detail",
                    default=_SHOWN.carry_detail,
                    optional=True,
                    advanced=True,
                    tooltip="A step that chooses tokens runs unmerged and its detail is carried through the "
                    "merged steps after it: much closer to the unmerged picture. Needs reselect_every above "
                    "1 and merge set to whole block." + _CUSTOM_ONLY,
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model, sampling with merged tokens.")],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> bool:
        """A preview that joins a finished graph needs one run that records."""
        return has_preview(running_prompt())

    @classmethod
    def validate_inputs(
        cls, preset: str | None, start_percent: float | None, end_percent: float | None
    ) -> bool | str:
        """What two widgets say together is checked before anything runs. One that gets its value by a link
        has none yet: None."""
        if preset is None:
            return True
        known = {"start_percent": start_percent, "end_percent": end_percent}
        known = {name: value for name, value in known.items() if value is not None}
        try:
            resolve(preset, "unet", **known)
        except SettingsError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model: io.Model.Type, preset: str, tile_size: str, **widgets) -> io.NodeOutput:
        family = family_of(model)
        sizes = {str(size): size for size in TILE_SIZES}
        tile_size = sizes.get(tile_size, tile_size) if isinstance(tile_size, str) else tile_size
        settings = resolve(preset, family.name, tile_size=tile_size, **widgets)
        record = has_preview(getattr(cls.hidden, "prompt", None))
        live = LivePicks(getattr(cls.hidden, "unique_id", None))
        return io.NodeOutput(patch(model, settings, record, live))
