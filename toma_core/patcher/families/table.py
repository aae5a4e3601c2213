"""The diffusion transformers whose tokens can be merged: one entry a model (entry.py says what its words mean).

A new model is one entry here and one line in the tests' table (CONTRIBUTING.md shows it on an example).
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from .entry import (
    Call,
    Entry,
    Stream,
    after_embedded_reference,
    after_reference,
    after_text,
    at_end,
    before_padding,
    cell,
    img_slice_or_end,
    square,
)

# --------------------------------------------------------------------------- what can't be merged


def _is_flat(call: Call) -> str | None:
    return None if call.x.ndim == 4 else f"the latent has {call.x.ndim} dimensions instead of 4"


def _flux(call: Call) -> str | None:
    usual = getattr(getattr(call.network, "params", None), "default_ref_method", None)  # which nodes may change
    method = call.inputs.get("ref_latents_method", usual)
    if call.inputs.get("ref_latents") is not None and method == "index_timestep_zero":
        return "reference latents with a timestep of zero are modulated by token ranges"
    return _is_flat(call)


def _one_frame(call: Call) -> str | None:
    if call.x.ndim == 5 and call.x.shape[2] > 1:
        return "the frames of the latent go through the network as a batch"
    return None


def _wan(call: Call) -> str | None:
    if call.options.get("ar_state") is not None:
        return "frames are drawn one after the other, from a cache of the tokens before"
    return None


def _wan_vace(call: Call) -> str | None:
    if len(call.network.blocks) - 1 in call.network.vace_layers_mapping:
        return "VACE adds to the tokens behind the last block"
    return _wan(call)


def _wan_animate(call: Call) -> str | None:
    if call.inputs.get("face_pixel_values") is not None:
        return "a face is added to the tokens of each frame between blocks"
    return _wan(call)


def _hunyuan(call: Call) -> str | None:
    if call.inputs.get("guiding_frame_index") is not None:
        return "the tokens of a guiding frame are modulated by ranges"
    return None


def _ltxv(call: Call) -> str | None:
    if call.inputs.get("keyframe_idxs") is not None:
        return "the tokens of guiding frames lie among those of the video"
    return None


REFUSED = {
    "comfy.ldm.wan.model:WanModel_S2V": "sound is added to the tokens of each frame between blocks",
    "comfy.ldm.wan.model_wandancer:WanDancerModel": "music is added to the tokens of each frame between blocks",
    "comfy.ldm.wan.model:HumoWanModel": "its blocks sort tokens by frame, to listen to the sound of each",
    "comfy.ldm.lightricks.av_model:LTXAVModel": "video and sound travel in one packed latent",
    "comfy.ldm.hidream_o1.model:HiDreamO1Transformer": "its blocks keep the tokens of the prompt from step to step",
    "comfy.ldm.ernie.model:ErnieImageModel": "its blocks are not told which run they belong to",
}


# --------------------------------------------------------------------------- the table

_DOUBLE = Stream("double_blocks", "double_block", text="txt", rows={"pe": 2}, masks=("attn_mask",), of_text=("txt_",))
_SINGLE = Stream("single_blocks", "single_block", start=after_text, rows={"pe": 2}, masks=("attn_mask",))
_QWEN_TEXT = ("txt_", "add_")
_OMNIGEN = Stream(
    "layers", image="hidden_states", start=at_end, rows={"image_rotary_emb": 1}, masks=("attention_mask",)
)
_WAN = Stream(
    "blocks",
    "double_block",
    text="txt",
    start=after_embedded_reference,
    rows={"pe": 1},
    per_frame={"vec": 4},
    crosses=True,
    of_text=("cross_attn.k", "cross_attn.v"),
    per_image=("_img",),  # each token of the context meets one pair of keys and values, of the text or of an image
)

ENTRIES = [
    Entry("flux", ("comfy.ldm.flux.model:Flux",), (_DOUBLE, _SINGLE), why_not=_flux, attention_patches=True),
    Entry(
        "chroma",
        ("comfy.ldm.chroma.model:Chroma", "comfy.ldm.chroma_radiance.model:ChromaRadiance"),
        (_DOUBLE, _SINGLE),
        why_not=_is_flat,
        attention_patches=True,
    ),
    Entry(
        "qwen image",
        ("comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",),
        # by its forward: a slot does not show timestep_zero_index
        (
            Stream(
                "transformer_blocks",
                image="hidden_states",
                text="encoder_hidden_states",
                rows={"image_rotary_emb": 2},
                bounds=("timestep_zero_index",),
                out=1,
                of_text=_QWEN_TEXT,
            ),
        ),
        double_block_patches=True,
    ),
    Entry(
        "mage flow",
        ("comfy.ldm.mage_flow.model:MageFlowTransformer2DModel",),
        (Stream("transformer_blocks", "double_block", text="txt", rows={"pe": 2}, of_text=_QWEN_TEXT),),
        cell,
        double_block_patches=True,
    ),
    Entry(
        "lens",
        ("comfy.ldm.lens.model:LensTransformer2DModel",),
        (
            Stream(
                "transformer_blocks",
                "double_block",
                text="txt",
                rows={"pe": 2},
                masks=("attn_mask",),
                text_first=False,
                of_text=_QWEN_TEXT,
            ),
        ),
        cell,
        double_block_patches=True,
    ),
    Entry(
        "joy image",
        ("comfy.ldm.joyimage.model:JoyImageTransformer3DModel",),
        (Stream("double_blocks", "double_block", text="txt", rows={"pe": 1}, of_text=("txt_",)),),
    ),
    Entry(
        "lumina",  # and Z-Image, NewBie
        ("comfy.ldm.lumina.model:NextDiT", "comfy.ldm.lumina.model:NextDiTPixelSpace"),
        (
            Stream(
                "layers",
                image="x",
                start=before_padding,
                rows={"freqs_cis": 1},
                masks=("x_mask",),
                bounds=("timestep_zero_index",),
            ),
        ),
    ),
    Entry(
        "krea 2",
        ("comfy.ldm.krea2.model:SingleStreamDiT",),
        (
            Stream(
                "blocks",
                image="x",
                start=img_slice_or_end,
                rows={"freqs": 2},
                masks=("mask",),
                bounds=("timestep_zero_index",),
            ),
        ),
        square("patch"),
        _one_frame,
    ),
    Entry(
        "cosmos predict2",
        ("comfy.ldm.cosmos.predict2:MiniTrainDIT", "comfy.ldm.anima.model:Anima"),
        (
            Stream(
                "blocks",
                image="x_B_T_H_W_D",
                text="crossattn_emb",
                rows={"rope_emb_L_1_1_D": 1},
                per_frame={"emb_B_T_D": 3, "adaln_lora_B_T_3D": 3},
                alone=("extra_per_block_pos_emb",),
                crosses=True,
                of_text=("cross_attn.k_proj", "cross_attn.v_proj"),
            ),
        ),
        lambda network: (network.patch_temporal, network.patch_spatial, network.patch_spatial),
    ),
    Entry(
        "wan",
        ("comfy.ldm.wan.model:WanModel", "comfy.ldm.wan.model:CameraWanModel", "comfy.ldm.wan.ar_model:CausalWanModel"),
        (_WAN,),
        why_not=_wan,
    ),
    Entry("wan animate", ("comfy.ldm.wan.model_animate:AnimateWanModel",), (_WAN,), why_not=_wan_animate),
    Entry(
        "wan scail",
        ("comfy.ldm.wan.model:SCAILWanModel", "comfy.ldm.wan.model:SCAIL2WanModel"),
        (replace(_WAN, start=after_reference),),
        why_not=_wan,
    ),
    Entry(
        "wan vace",
        ("comfy.ldm.wan.model:VaceWanModel",),
        (
            _WAN,
            Stream(
                "vace_blocks",
                image="c",
                text="context",
                rows={"x": 1, "freqs": 1},
                out=1,
                side=True,
                crosses=True,
                of_text=_WAN.of_text,
            ),
        ),
        why_not=_wan_vace,
    ),
    Entry(
        "hunyuan",
        ("comfy.ldm.hunyuan_video.model:HunyuanVideo",),
        (
            replace(_DOUBLE, start=at_end, masks=("attention_mask",)),
            replace(_SINGLE, start=at_end, masks=("attention_mask",)),
        ),
        why_not=_hunyuan,
    ),
    Entry(
        "sd3",
        ("comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",),
        (Stream("joint_blocks", "double_block", text="txt", of_text=("context_block",), image_only="x_block.attn2"),),
    ),
    Entry(
        "auraflow",
        ("comfy.ldm.aura.mmdit:MMDiT",),
        (
            Stream("double_layers", "double_block", text="txt", of_text=("attn.w1", "mlpC")),
            Stream("single_layers", "single_block", start=at_end),
        ),
    ),
    Entry(
        "kandinsky 5",
        ("comfy.ldm.kandinsky5.model:Kandinsky5",),
        # by its forward: calling a block from its slot raises
        (
            Stream(
                "visual_transformer_blocks",
                image="visual_embed",
                text="text_embed",
                rows={"freqs": 1},
                crosses=True,
                of_text=("cross_attention.to_key", "cross_attention.to_value"),
            ),
        ),
    ),
    Entry(
        "ideogram 4",
        ("comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel",),
        (Stream("layers", image="x", start=at_end, rows={"freqs_cis": 1}, masks=("attn_mask",)),),
        cell,
    ),
    Entry(
        "omnigen 2",
        ("comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",),
        (_OMNIGEN,),
    ),
    Entry(
        "boogu",
        ("comfy.ldm.boogu.model:BooguTransformer2DModel",),
        (
            Stream(
                "double_stream_layers",
                image="img_hidden_states",
                text="instruct_hidden_states",
                start=at_end,
                rows={"joint_rotary_emb": 1, "img_rotary_emb": 1},
                out=0,
                alone=("joint_attention_mask", "img_attention_mask"),
                of_text=("instruct_to", "instruct_out", "instruct_feed"),
                image_only="img_self_attn",
            ),
            replace(_OMNIGEN, blocks="single_stream_layers"),
        ),
    ),
    Entry(
        "ltxv",
        ("comfy.ldm.lightricks.model:LTXVModel",),
        (
            Stream(
                "transformer_blocks",
                "double_block",
                text="txt",
                rows={"pe": 1, "vec": 1},
                tuples=True,
                alone=("self_attention_mask",),
                crosses=True,
                of_text=("attn2.to_k", "attn2.to_v"),
            ),
        ),
        cell,
        _ltxv,
    ),
]

_BY_CLASS = {network: entry for entry in ENTRIES for network in entry.networks}


def entry_of(network: nn.Module) -> Entry | str | None:
    """The entry of a network's class, if its blocks are where they should be; or why its tokens can't be merged.

    A class of another pack counts as the one of ComfyUI's that it derives from. A class of ComfyUI's own that is not
    in the table is unknown, whatever it derives from: it may do something else between its blocks."""
    for kind in type(network).__mro__:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if name in REFUSED:
            return REFUSED[name]
        if name in _BY_CLASS:
            entry = _BY_CLASS[name]
            there = all(hasattr(network, stream.blocks.split(".")[0]) for stream in entry.streams)
            return entry if there else None
        if kind.__module__.startswith("comfy."):
            return None
    return None
