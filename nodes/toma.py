"""The node `ToMA`: a MODEL goes in, a faster MODEL comes out."""

from __future__ import annotations

import logging

from comfy_api.latest import io

from ..toma_core.patcher import family_of, patch
from ..toma_core.plan import PATIENCE
from ..toma_core.settings import (
    BUDGETS,
    CUSTOM,
    CUSTOM_START,
    DEFAULT,
    PRESETS,
    TILE_SIZES,
    MergeWhere,
    SettingsError,
    resolve,
)
from .live import Live, as_widgets
from .running import has_preview, running_prompt
from .unsampled import met, watch

_CUSTOM_ONLY = " Counts with the preset 'custom'."
_SHOWN = CUSTOM_START
_told: set[str] = set()


def _presets_for_page() -> dict:
    """PRESETS as the widgets hold them, for the front end to show."""
    return {name: {f: as_widgets(s) for f, s in families.items()} for name, families in PRESETS.items()}


class ToMA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMA",
            display_name="ToMA (Token Merging)",
            category="model/patch",
            description="Makes sampling faster: steps whose answer can be forecast are not run, and in others alike "
            "image tokens are computed together. Put it between the model loader and the sampler.",
            search_aliases=["token merge", "tome", "speed", "faster", "accelerate", "cache", "skip steps"],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster: any diffusion model."),
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default=DEFAULT,
                    tooltip="How much speed for how much closeness to the plain image. quality: closest. balanced: a "
                    "good default. fast: faster, the image may change in details. turbo: for runs of up to 8 steps. "
                    "paper: the published ToMA settings. custom: the values below.",
                    extra_dict={"presets": _presets_for_page(), "patience": PATIENCE},
                ),
                io.Float.Input(
                    "ratio",
                    default=_SHOWN.ratio,
                    min=0.0,
                    max=0.95,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    optional=True,
                    tooltip="Share of the image tokens that is merged away in merged steps: 0.5 computes half of them. "
                    "More is faster and less faithful; 0: no tokens are merged." + _CUSTOM_ONLY,
                ),
                io.Combo.Input(
                    "tile_size",
                    options=[str(size) for size in TILE_SIZES],
                    default=str(_SHOWN.tile_size),
                    optional=True,
                    tooltip="Tokens are compared within tiles of this many tokens a side. Small tiles are "
                    "quick and keep structure; 0 compares the whole image and is slow." + _CUSTOM_ONLY,
                ),
                io.Int.Input(
                    "reselect_every",
                    default=_SHOWN.reselect_every,
                    min=1,
                    max=100,
                    optional=True,
                    tooltip="Choose the tokens to keep anew after this many merged steps." + _CUSTOM_ONLY,
                ),
                io.Int.Input(
                    "reweight_every",
                    default=_SHOWN.reweight_every,
                    min=1,
                    max=100,
                    optional=True,
                    tooltip="Between two choices, work out anew after this many steps which token is merged "
                    "into which." + _CUSTOM_ONLY,
                ),
                io.Float.Input(
                    "start_percent",
                    default=_SHOWN.start_percent,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="Merge from this part of the sampler's steps on." + _CUSTOM_ONLY,
                ),
                io.Float.Input(
                    "end_percent",
                    default=_SHOWN.end_percent,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="Merge up to this part of the sampler's steps; the rest runs unmerged." + _CUSTOM_ONLY,
                ),
                io.Combo.Input(
                    "merge",
                    options=[where.value for where in MergeWhere],
                    default=_SHOWN.merge.value,
                    optional=True,
                    advanced=True,
                    tooltip="What runs on merged tokens: rows of whole transformer blocks (fastest), each layer on its "
                    "own (as published; on a DiT each block on its own), or attention only." + _CUSTOM_ONLY,
                ),
                io.Combo.Input(
                    "budget",
                    options=list(BUDGETS),
                    default=_SHOWN.budget,
                    optional=True,
                    advanced=True,
                    tooltip="equal: every tile keeps as many tokens. adaptive: tiles with more detail keep "
                    "more." + _CUSTOM_ONLY,
                ),
                io.Int.Input(
                    "skip_first_blocks",
                    default=_SHOWN.skip_first_blocks,
                    min=-1,
                    max=100,
                    optional=True,
                    advanced=True,
                    tooltip="Leave this many first blocks unmerged. -1: what is best for the model." + _CUSTOM_ONLY,
                ),
                io.Boolean.Input(
                    "carry_detail",
                    default=False,  # workflows of 0.1.0 have True
                    optional=True,
                    advanced=True,
                    tooltip="Has no effect any more: tolerance has taken its place. Older workflows still load.",
                ),
                io.Float.Input(
                    "tolerance",
                    default=_SHOWN.tolerance,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    optional=True,
                    tooltip="About how far forecasts may take the image from the plain one, relative to it, whatever "
                    "the number of steps. More is faster. 0: nothing is forecast." + _CUSTOM_ONLY,
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model, sampling faster.")],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            not_idempotent=True,  # of two nodes alike each tells of its own runs; cached all the same
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> bool:
        """A preview that joins a finished graph needs one run that records. Asked at the begin of each prompt."""
        watch()
        return has_preview(running_prompt())

    @classmethod
    def validate_inputs(
        cls, preset: str | None = None, start_percent: float | None = None, end_percent: float | None = None
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
    def execute(cls, model: io.Model.Type, preset: str = DEFAULT, **widgets) -> io.NodeOutput:
        sizes = {str(size): size for size in TILE_SIZES}
        if isinstance(widgets.get("tile_size"), str):
            widgets["tile_size"] = sizes.get(widgets["tile_size"], widgets["tile_size"])
        if preset == CUSTOM and widgets.get("carry_detail") is True and "carry_detail" not in _told:
            _told.add("carry_detail")
            logging.info("ToMA: carry_detail has no effect any more, tolerance has taken its place.")
        settings = resolve(preset, family_of(model).kind, **widgets)
        record = has_preview(getattr(cls.hidden, "prompt", None))
        live = Live(getattr(cls.hidden, "unique_id", None) or "")
        met(live.node_id)
        return io.NodeOutput(patch(model, settings, record, live))
