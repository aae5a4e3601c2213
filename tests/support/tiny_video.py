"""Entries of the table in tiny_models.py: models that draw video."""

from __future__ import annotations

from types import SimpleNamespace

from tiny_image import HUNYUAN_IMAGE, PREDICT2, padded
from tiny_models import Given, Tiny

WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 128, "out_dim": 16, "num_heads": 1, "ffn_dim": 192,
    "num_layers": 3, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True,
    "cross_attn_norm": True, "eps": 1e-6, "in_dim": 16,
}  # fmt: skip
WAN_TEXT = 4096  # no option where a checkpoint is loaded
WAN_SHAPE = (16, 3, 8, 8)
WAN22 = {**WAN, "in_dim": 48, "out_dim": 48}
HUNYUAN_VIDEO = {
    **HUNYUAN_IMAGE, "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "axes_dim": [16, 56, 56],
    "vec_in_dim": 768, "byt5": False, "guidance_embed": True,
}  # fmt: skip
HUNYUAN_15 = {
    **HUNYUAN_IMAGE, "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "axes_dim": [16, 56, 56],
    "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
}  # fmt: skip


def clip_vision(given: Given, width: int = 1280, tokens: int = 257) -> SimpleNamespace:
    hidden = given.noise(given.shape[0], tokens, width)
    return SimpleNamespace(penultimate_hidden_states=hidden, last_hidden_state=hidden)


def start_image(given: Given) -> dict:
    """The first frame, as WanImageToVideo gives it."""
    mask = given.noise(given.shape[0], 1, *given.shape[2:]).fill_(1)
    mask[:, :, :1] = 0
    return {
        "concat_latent_image": given.noise(*given.shape), "concat_mask": mask, "clip_vision_output": clip_vision(given)
    }  # fmt: skip


def control_frames(given: Given) -> dict:
    batch, channels, *rest = given.shape
    return {"concat_latent_image": given.noise(batch, 2 * channels, *rest)}


def vace(given: Given) -> dict:
    batch, _, *rest = given.shape
    return {
        "vace_frames": [given.noise(batch, 32, *rest)], "vace_mask": [given.noise(batch, 64, *rest)],
        "vace_strength": [0.7],
    }  # fmt: skip


def camera(given: Given) -> dict:
    batch, _, frames, rows, columns = given.shape
    return {**start_image(given), "camera_conditions": given.noise(batch, 24, frames, rows * 8, columns * 8)}


def wan_reference(given: Given) -> dict:
    """A still in front of the frames (Fun Control)."""
    batch, channels, _, rows, columns = given.shape
    return {**control_frames(given), "reference_latents": [given.noise(batch, channels, 1, rows, columns)]}


def bernini(given: Given) -> dict:
    return {"context_latents": [given.noise(*given.shape)]}


def glyphs_and_image(given: Given) -> dict:
    return {
        "conditioning_byt5small": given.noise(given.shape[0], 5, 1472),
        "clip_vision_output": clip_vision(given, 1152, 9), "concat_latent_image": given.noise(*given.shape),
    }  # fmt: skip


def guiding_frame(given: Given) -> dict:
    return {"guiding_frame_index": 0}


def ref_latent(given: Given) -> dict:
    batch, channels, _, rows, columns = given.shape
    return {"ref_latent": given.noise(batch, channels, 1, rows, columns)}


def sound_to_video(given: Given) -> dict:
    batch, channels, _, rows, columns = given.shape
    return {
        "audio_embed": given.noise(batch, 25, 1024, 4 * given.shape[2]),
        "reference_latents": [given.noise(batch, channels, 1, rows, columns)],
        "reference_motion": given.noise(batch, channels, 19, rows, columns),
    }  # fmt: skip


def humo(given: Given) -> dict:
    batch, channels, frames, rows, columns = given.shape
    return {
        "audio_embed": given.noise(batch, frames, 8, 5, 1280),
        "reference_latents": [given.noise(batch, channels, 1, rows, columns)],
    }  # fmt: skip


def animate(given: Given) -> dict:
    """Without the face: its encoder takes images of 512 px only, six seconds each on a CPU."""
    batch, channels, frames, rows, columns = given.shape
    return {
        **start_image(given),
        "pose_video_latent": given.noise(batch, channels, frames - 1, rows, columns),
    }


def scail(given: Given) -> dict:
    batch, channels, frames, rows, columns = given.shape
    return {
        "clip_vision_output": clip_vision(given),
        "reference_latents": [given.noise(batch, channels, 1, rows, columns)],
        "pose_video_latent": given.noise(batch, channels, frames, rows // 2, columns // 2),
    }  # fmt: skip


def dancer(given: Given) -> dict:
    return {
        **start_image(given), "audio_embed": given.noise(given.shape[0], 12, 35),
        "clip_vision_output_ref": clip_vision(given),
    }  # fmt: skip


def wan(name: str, kind: str, changes: dict, **options) -> Tiny:
    defaults = {"shape": WAN_SHAPE, "text": WAN_TEXT, "detected": True}
    return Tiny(name, kind, {**WAN, **changes}, **{**defaults, **options})


CASES = [
    wan("wan21_t2v", "WAN21_T2V", {}),
    wan("wan21_i2v", "WAN21_I2V", {"model_type": "i2v", "in_dim": 36}, extra=start_image),
    wan("wan21_fun_control", "WAN21_FunControl2V", {"model_type": "i2v", "in_dim": 48, "in_dim_ref_conv": 16},
        extra=wan_reference),
    wan("wan21_bernini", "WAN21_T2V", {}, extra=bernini),
    wan("wan22_5b", "WAN22_T2V", WAN22, shape=(48, 3, 8, 8)),
    wan("wan22_5b_i2v", "WAN22_T2V", WAN22, shape=(48, 3, 8, 8), frame_kept=True),
    wan("wan21_vace", "WAN21_Vace", {"model_type": "vace", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 96},
        extra=vace),
    wan("wan21_camera", "WAN21_Camera", {"model_type": "camera", "in_dim": 32}, extra=camera),
    wan("wan22_camera", "WAN22_Camera", {"model_type": "camera_2.2", "in_dim": 36}, extra=camera),
    wan("wan21_causal_ar", "WAN21_CausalAR_T2V", {}, detected=False),
    wan("wan22_s2v", "WAN22_S2V", {"model_type": "s2v"}, extra=sound_to_video),
    wan("wan21_humo", "WAN21_HuMo", {"model_type": "humo"}, extra=humo),
    wan("wan22_animate", "WAN22_Animate", {"model_type": "animate", "in_dim": 36, "num_layers": 5}, extra=animate),
    wan("wan21_flow_rvs", "WAN21_FlowRVS", {"model_type": "flow_rvs"}, detected=False),
    wan("wan21_scail", "WAN21_SCAIL", {"model_type": "scail", "in_dim": 20}, extra=scail),
    wan("wan21_scail2", "WAN21_SCAIL2", {"model_type": "scail2", "in_dim": 20}, extra=scail),
    wan("wan22_dancer", "WAN22_WanDancer", {"model_type": "wandancer", "in_dim": 36}, extra=dancer),
    Tiny("hunyuan_video", "HunyuanVideo", HUNYUAN_VIDEO, WAN_SHAPE, pooled=768, cfg=1.0, detected=True,
         extra=padded),
    Tiny("hunyuan_video_i2v", "HunyuanVideoI2V", {**HUNYUAN_VIDEO, "in_channels": 33}, WAN_SHAPE, pooled=768,
         cfg=1.0, detected=True, extra=guiding_frame),
    Tiny("hunyuan_video_skyreels", "HunyuanVideoSkyreelsI2V", {**HUNYUAN_VIDEO, "in_channels": 32}, WAN_SHAPE,
         pooled=768, detected=True),
    Tiny("hunyuan_video_ref", "HunyuanVideo", HUNYUAN_VIDEO, WAN_SHAPE, pooled=768, cfg=1.0, detected=True,
         extra=ref_latent),
    Tiny("hunyuan_video_15", "HunyuanVideo15", HUNYUAN_15, (32, 3, 4, 4), detected=True, extra=glyphs_and_image),
    Tiny("hunyuan_video_15_sr", "HunyuanVideo15_SR_Distilled", {**HUNYUAN_15, "in_channels": 98}, (32, 3, 4, 4),
         cfg=1.0, detected=True),
    Tiny("hunyuan_image_refiner", "HunyuanImage21Refiner", {**HUNYUAN_15, "in_channels": 128, "out_channels": 64,
                                                           "vision_in_dim": None, "byt5": False,
                                                           "use_cond_type_embedding": False, "meanflow_sum": False},
         (64, 1, 8, 8), (32, 1, 8, 8), cfg=1.0, detected=True),
    Tiny("cosmos_predict2_i2v", "CosmosI2VPredict2", {**PREDICT2, "in_channels": 17}, WAN_SHAPE, frame_kept=True),
    Tiny("cosmos_predict2_video", "CosmosT2IPredict2", PREDICT2, WAN_SHAPE),
]  # fmt: skip

NOT_SAMPLED: dict[str, str] = {}
