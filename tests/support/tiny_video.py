"""Entries of the table in tiny_models.py: models that draw video."""

from __future__ import annotations

from types import SimpleNamespace

from tiny_image import HUNYUAN_IMAGE, KANDINSKY, PREDICT2, padded
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
LTXV = {"image_model": "ltxv", "num_layers": 3, "attention_head_dim": 2, "cross_attention_dim": 64}
LTX2 = {
    "image_model": "ltxav", "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4,
    "audio_attention_head_dim": 8, "audio_num_attention_heads": 4, "cross_attention_dim": 64,
    "audio_cross_attention_dim": 32, "caption_channels": 64, "rope_type": "split", "use_middle_indices_grid": True,
    "causal_temporal_positioning": True, "connector_attention_head_dim": 16, "connector_num_attention_heads": 4,
    "connector_num_layers": 1,
}  # fmt: skip
LTX23 = {
    **LTX2, "caption_proj_before_connector": True, "caption_projection_first_linear": False,
    "cross_attention_adaln": True, "apply_gated_attention": True, "audio_connector_num_attention_heads": 2,
}  # fmt: skip
AV_SHAPE = ((128, 3, 4, 4), (8, 10, 16))  # video, sound
MOCHI = {
    "image_model": "mochi_preview", "depth": 2, "patch_size": 2, "num_heads": 2, "hidden_size_x": 64,
    "hidden_size_y": 32, "mlp_ratio_x": 192.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12,
    "qk_norm": True, "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True,
    "posenc_preserve_area": True, "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0,
    "use_t5": True, "t5_feat_dim": 64, "t5_token_length": 16, "rope_theta": 10000.0,
}  # fmt: skip
COSMOS = {
    "image_model": "cosmos", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 64, "num_blocks": 3,
    "num_heads": 2, "crossattn_emb_channels": 64, "block_config": "FA-CA-MLP", "concat_padding_mask": True,
    "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "pos_emb_interpolation": "crop",
    "block_x_format": "THWBD", "affline_emb_norm": True, "use_adaln_lora": True, "adaln_lora_dim": 32,
    "extra_per_block_abs_pos_emb": True, "rope_h_extrapolation_ratio": 1.0, "rope_w_extrapolation_ratio": 1.0,
    "rope_t_extrapolation_ratio": 2.0, "extra_per_block_abs_pos_emb_type": "learnable",
}  # fmt: skip
COG = {
    "image_model": "cogvideox", "num_attention_heads": 1, "attention_head_dim": 64, "time_embed_dim": 32,
    "num_layers": 3, "in_channels": 16, "patch_size": 2, "text_embed_dim": 64,
    "use_learned_positional_embeddings": False, "use_rotary_positional_embeddings": True,
}  # fmt: skip
SEEDVR2 = {
    "image_model": "seedvr2", "vid_dim": 64, "heads": 2, "head_dim": 128, "num_layers": 4, "mm_layers": 2,
    "norm_eps": 1e-5, "mlp_type": "swiglu", "vid_out_norm": True,
}  # fmt: skip
MINIMAX = {
    "image_model": "minimax_h3", "hidden_size": 64, "num_layers": 3, "token_refiner_num_layers": 1,
    "num_attention_heads": 2, "attention_head_dim": 128, "ffn_hidden_size": 96, "text_dim": 48,
    "time_embed_hidden_size": 64, "time_embed_dim": 32,
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


def small_audio_encoder(network) -> None:
    """Its width is no option of the model; as it is, it has 40 million weights."""
    import comfy.ops

    network.audio_proj = type(network.audio_proj)(
        seq_len=8, blocks=5, channels=16, intermediate_dim=64, output_dim=1536, context_tokens=16,
        operations=comfy.ops.disable_weight_init,
    )  # fmt: skip


def humo(given: Given) -> dict:
    batch, channels, frames, rows, columns = given.shape
    return {
        "audio_embed": given.noise(batch, frames, 8, 5, 16),
        "reference_latents": [given.noise(batch, channels, 1, rows, columns)],
    }  # fmt: skip


def small_face_encoder(network) -> None:
    """A stand-in, the only one here: ComfyUI's own takes images of 512 px, six seconds each on a CPU."""
    import torch

    class Faces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.direction = torch.nn.Linear(3 * 8 * 8, 512)

        def get_motion(self, image):
            return self.direction(torch.nn.functional.adaptive_avg_pool2d(image, 8).flatten(1))

    network.motion_encoder = Faces()


def animate(given: Given) -> dict:
    batch, channels, frames, rows, columns = given.shape
    pose = given.noise(batch, channels, frames - 1, rows, columns)
    return {**start_image(given), "pose_video_latent": pose}


def animate_face(given: Given) -> dict:
    return {**animate(given), "face_video_pixels": given.noise(given.shape[0], 3, 8, 64, 64).tanh()}


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


def low_resolution(given: Given) -> dict:
    batch, channels, *rest = given.shape
    return {"condition": given.noise(batch, channels + 1, *rest)}


def wan(name: str, kind: str, changes: dict, **options) -> Tiny:
    defaults = {"shape": WAN_SHAPE, "text": WAN_TEXT, "detected": True}
    return Tiny(name, kind, {**WAN, **changes}, **{**defaults, **options})


CASES = [
    wan("wan21_t2v", "WAN21_T2V", {}),
    wan("wan21_i2v", "WAN21_I2V", {"model_type": "i2v", "in_dim": 36}, extra=start_image),
    wan("wan21_fun_control", "WAN21_FunControl2V", {"model_type": "i2v", "in_dim": 48, "in_dim_ref_conv": 16},
        extra=wan_reference, odd=False),
    wan("wan21_bernini", "WAN21_T2V", {}, extra=bernini),
    wan("wan22_5b", "WAN22_T2V", WAN22, shape=(48, 3, 8, 8)),
    wan("wan22_5b_i2v", "WAN22_T2V", WAN22, shape=(48, 3, 8, 8), frame_kept=True),
    wan("wan21_vace", "WAN21_Vace", {"model_type": "vace", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 96},
        extra=vace, odd=False),
    wan("wan21_camera", "WAN21_Camera", {"model_type": "camera", "in_dim": 32}, extra=camera, odd=False),
    wan("wan22_camera", "WAN22_Camera", {"model_type": "camera_2.2", "in_dim": 36}, extra=camera, odd=False),
    wan("wan21_causal_ar", "WAN21_CausalAR_T2V", {}, detected=False),
    wan("wan22_s2v", "WAN22_S2V", {"model_type": "s2v"}, extra=sound_to_video, why="sound"),
    wan("wan21_humo", "WAN21_HuMo", {"model_type": "humo"}, detected=False, shrink=small_audio_encoder, extra=humo,
        why="sort tokens by frame"),
    wan("wan22_animate", "WAN22_Animate", {"model_type": "animate", "in_dim": 36, "num_layers": 5}, detected=False,
        shrink=small_face_encoder, extra=animate, odd=False),
    wan("wan22_animate_face", "WAN22_Animate", {"model_type": "animate", "in_dim": 36, "num_layers": 5},
        detected=False, shrink=small_face_encoder, extra=animate_face, why="a face"),
    wan("wan21_flow_rvs", "WAN21_FlowRVS", {"model_type": "flow_rvs"}, detected=False),
    wan("wan21_scail", "WAN21_SCAIL", {"model_type": "scail", "in_dim": 20}, extra=scail),
    wan("wan21_scail2", "WAN21_SCAIL2", {"model_type": "scail2", "in_dim": 20}, extra=scail),
    wan("wan22_dancer", "WAN22_WanDancer", {"model_type": "wandancer", "in_dim": 36}, extra=dancer, why="music"),
    Tiny("hunyuan_video", "HunyuanVideo", HUNYUAN_VIDEO, WAN_SHAPE, pooled=768, cfg=1.0, detected=True,
         extra=padded, odd=False, pairs=False),
    Tiny("hunyuan_video_i2v", "HunyuanVideoI2V", {**HUNYUAN_VIDEO, "in_channels": 33}, WAN_SHAPE, pooled=768,
         cfg=1.0, detected=True, extra=guiding_frame, why="guiding frame"),
    Tiny("hunyuan_video_skyreels", "HunyuanVideoSkyreelsI2V", {**HUNYUAN_VIDEO, "in_channels": 32}, WAN_SHAPE,
         pooled=768, detected=True, odd=False),
    Tiny("hunyuan_video_ref", "HunyuanVideo", HUNYUAN_VIDEO, WAN_SHAPE, pooled=768, cfg=1.0, detected=True,
         extra=ref_latent, odd=False, pairs=False),
    Tiny("hunyuan_video_15", "HunyuanVideo15", HUNYUAN_15, (32, 3, 4, 4), detected=True, extra=glyphs_and_image),
    Tiny("hunyuan_video_15_sr", "HunyuanVideo15_SR_Distilled", {**HUNYUAN_15, "in_channels": 98}, (32, 3, 4, 4),
         cfg=1.0, detected=True),
    Tiny("hunyuan_image_refiner", "HunyuanImage21Refiner", {**HUNYUAN_15, "in_channels": 128, "out_channels": 64,
                                                           "vision_in_dim": None, "byt5": False,
                                                           "use_cond_type_embedding": False, "meanflow_sum": False},
         (64, 1, 8, 8), (32, 1, 8, 8), cfg=1.0, detected=True),
    Tiny("cosmos_predict2_i2v", "CosmosI2VPredict2", {**PREDICT2, "in_channels": 17}, WAN_SHAPE, frame_kept=True),
    Tiny("cosmos_predict2_video", "CosmosT2IPredict2", PREDICT2, WAN_SHAPE),
    Tiny("kandinsky5", "Kandinsky5", {**KANDINSKY, "visual_embed_dim": 132}, WAN_SHAPE, text=3584, pooled=768,
         detected=True, odd=False),
    Tiny("ltxv", "LTXV", LTXV, (128, 3, 4, 4), text=4096, detected=True, extra=padded),
    Tiny("ltxv_i2v", "LTXV", LTXV, (128, 3, 4, 4), text=4096, detected=True, extra=padded, frame_kept=True),
    Tiny("ltx2", "LTXAV", LTX2, AV_SHAPE, text=128, why="packed"),
    Tiny("ltx23", "LTXAV", LTX23, AV_SHAPE, text=96, why="packed"),
    Tiny("mochi", "GenmoMochi", MOCHI, (12, 3, 8, 8), extra=padded, why="is not known"),
    Tiny("cosmos1", "CosmosT2V", COSMOS, WAN_SHAPE, why="is not known"),
    Tiny("cosmos1_i2v", "CosmosI2V", {**COSMOS, "in_channels": 17}, WAN_SHAPE, frame_kept=True, why="is not known"),
    Tiny("cogvideox", "CogVideoX_T2V", COG, WAN_SHAPE, detected=True, why="is not known"),
    Tiny("cogvideox_i2v", "CogVideoX_I2V", {**COG, "in_channels": 32}, WAN_SHAPE, detected=True, why="is not known"),
    Tiny("cogvideox15", "CogVideoX_I2V", {**COG, "in_channels": 32, "patch_size_t": 2}, (16, 4, 8, 8),
         detected=True, why="is not known"),
    Tiny("cogvideox_inpaint", "CogVideoX_Inpaint", {**COG, "in_channels": 48}, WAN_SHAPE, detected=True,
         why="is not known"),
    Tiny("seedvr2", "SeedVR2", SEEDVR2, (16, 1, 16, 16), text=5120, cfg=1.0, extra=low_resolution, why="is not known"),
    Tiny("minimax_h3", "MiniMaxH3", MINIMAX, ((24, 2, 4, 4), (32, 2, 7)), text=48, cfg=1.0, detected=True,
         why="is not known"),
]  # fmt: skip

NOT_SAMPLED: dict[str, str] = {}
