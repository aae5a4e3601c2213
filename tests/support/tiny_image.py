"""Entries of the table in tiny_models.py: models that draw one image."""

from __future__ import annotations

from tiny_models import Given, Tiny, references

FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 32, "context_in_dim": 64,
    "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 3,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
    "txt_ids_dims": [],
}  # fmt: skip
FLUX2 = {
    **FLUX, "image_model": "flux2", "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "mlp_ratio": 3.0,
    "axes_dim": [32, 32, 32, 32], "theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": False,
    "txt_ids_dims": [3], "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
    "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
CHROMA = {
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "context_in_dim": 64, "hidden_size": 128,
    "mlp_ratio": 4.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 3, "axes_dim": [16, 56, 56],
    "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 128, "hidden_dim": 64,
    "n_layers": 2, "txt_ids_dims": [], "vec_in_dim": None,
}  # fmt: skip
RADIANCE = {
    **CHROMA, "image_model": "chroma_radiance", "in_channels": 3, "out_channels": 3, "patch_size": 16,
    "nerf_hidden_size": 16, "nerf_mlp_ratio": 2, "nerf_depth": 2, "nerf_max_freqs": 4, "nerf_tile_size": 512,
    "nerf_final_head_type": "conv", "nerf_embedder_dtype": None, "use_x0": False, "use_sequential_txt_ids": False,
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 32,
    "num_attention_heads": 2, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
LUMINA = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 96, "cap_feat_dim": 64, "n_layers": 3,
    "qk_norm": True, "n_heads": 2, "n_kv_heads": 1, "axes_dims": [16, 16, 16], "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
}  # fmt: skip
Z_IMAGE = {
    **LUMINA, "dim": 256, "n_kv_heads": 2, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}  # fmt: skip
KREA = {
    "image_model": "krea2", "features": 256, "channels": 16, "patch": 2, "layers": 3, "heads": 2, "kvheads": 1,
    "txtlayers": 2, "txtdim": 40,
}  # fmt: skip
SD3 = {
    "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 3, "input_size": None, "adm_in_channels": 48,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 192}},
    "num_patches": 24 * 24, "pos_embed_max_size": 24, "qk_norm": "rms", "pos_embed_scaling_factor": None,
    "x_block_self_attn_layers": [],
}  # fmt: skip
AURA = {
    "max_seq": 256, "cond_seq_dim": 64, "n_double_layers": 2, "n_layers": 4, "dim": 64, "n_heads": 2,
    "global_conddim": 64,
}  # fmt: skip
HUNYUAN_IMAGE = {
    "image_model": "hunyuan_video", "in_channels": 64, "patch_size": [1, 1], "out_channels": 64,
    "vec_in_dim": None, "axes_dim": [64, 64], "meanflow": False, "context_in_dim": 64, "hidden_size": 128,
    "mlp_ratio": 4.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 3, "theta": 256, "qkv_bias": True,
    "byt5": True, "guidance_embed": False, "use_cond_type_embedding": False, "vision_in_dim": None,
    "meanflow_sum": False,
}  # fmt: skip


PREDICT2 = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 64, "concat_padding_mask": True,
    "crossattn_emb_channels": 64, "pos_emb_cls": "rope3d", "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30, "use_adaln_lora": True, "adaln_lora_dim": 32,
    "num_blocks": 3, "num_heads": 2, "extra_per_block_abs_pos_emb": False, "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0, "rope_t_extrapolation_ratio": 1.0, "extra_h_extrapolation_ratio": 1.0,
    "extra_w_extrapolation_ratio": 1.0, "extra_t_extrapolation_ratio": 1.0, "rope_enable_fps_modulation": False,
}  # fmt: skip
MAGE = {**QWEN, "image_model": "mage_flow", "in_channels": 128, "out_channels": 128}
JOY = {
    "image_model": "joyimage", "in_channels": 16, "hidden_size": 64, "patch_size": [1, 2, 2], "num_layers": 3,
    "num_attention_heads": 2, "text_dim": 64, "rope_dim_list": [8, 12, 12],
}  # fmt: skip
LENS = {
    "image_model": "lens", "in_channels": 128, "out_channels": 32, "num_layers": 3, "num_attention_heads": 1,
    "enc_hidden_dim": 32, "multi_layer_encoder_feature": True, "selected_layer_index": (0, 1),
}  # fmt: skip
KANDINSKY = {
    "image_model": "kandinsky5", "model_dim": 128, "time_dim": 64, "ff_dim": 256, "visual_embed_dim": 64,
    "num_text_blocks": 1, "num_visual_blocks": 3,
}  # fmt: skip
IDEOGRAM = {
    "image_model": "ideogram4", "in_channels": 128, "num_layers": 3, "num_attention_heads": 2,
    "attention_head_dim": 32, "intermediate_size": 96, "adaln_dim": 32, "llm_features_dim": 64,
    "rope_theta": 5000000, "mrope_section": [4, 3, 3], "norm_eps": 1e-5,
}  # fmt: skip
OMNIGEN = {
    "image_model": "omnigen2", "axes_dim_rope": [16, 16, 16], "axes_lens": [1024, 1664, 1664],
    "ffn_dim_multiplier": None, "hidden_size": 96, "in_channels": 16, "multiple_of": 64, "norm_eps": 1e-5,
    "num_attention_heads": 2, "num_kv_heads": 1, "num_layers": 3, "num_refiner_layers": 1, "out_channels": None,
    "patch_size": 2, "text_feat_dim": 64, "timestep_scale": 1000.0,
}  # fmt: skip
BOOGU = {
    "image_model": "boogu", "axes_dim_rope": [16, 16, 16], "hidden_size": 96, "multiple_of": 64,
    "num_attention_heads": 2, "num_kv_heads": 1, "num_layers": 2, "num_double_stream_layers": 2,
    "num_refiner_layers": 1, "instruction_feat_dim": 64,
}  # fmt: skip
ERNIE = {
    "image_model": "ernie", "hidden_size": 64, "num_attention_heads": 2, "num_layers": 3, "ffn_hidden_size": 96,
    "text_in_dim": 64, "rope_axes_dim": (8, 12, 12),
}  # fmt: skip
HIDREAM = {
    "image_model": "hidream", "attention_head_dim": 32, "axes_dims_rope": [16, 8, 8], "caption_channels": [64, 64],
    "max_resolution": [128, 128], "in_channels": 16, "llama_layers": [0, 1, 1, 1], "num_attention_heads": 2,
    "num_routed_experts": 2, "num_activated_experts": 1, "num_layers": 2, "num_single_layers": 2,
    "out_channels": 16, "patch_size": 2, "text_emb_dim": 48,
}  # fmt: skip
HIDREAM_O1 = {
    "image_model": "hidream_o1",
    "text_config_overrides": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "rope_dims": [8, 4, 4],
    },
    "vision_config_overrides": {"hidden_size": 64, "intermediate_size": 96, "depth": 1, "num_heads": 2},
}  # fmt: skip
PIXART = {
    "image_model": "pixart_sigma", "num_heads": 2, "patch_size": 2, "hidden_size": 96, "in_channels": 4, "depth": 3,
    "model_max_length": 16, "input_size": 32, "pe_interpolation": 1, "micro_condition": False,
    "caption_channels": 64,
}  # fmt: skip
HYDIT = {
    "image_model": "hydit", "depth": 4, "hidden_size": 64, "num_heads": 2, "text_states_dim": 64,
    "text_states_dim_t5": 48, "text_len": 16, "text_len_t5": 9,
}  # fmt: skip
PIXELDIT = {
    "image_model": "pixeldit_t2i", "num_groups": 2, "hidden_size": 64, "pixel_hidden_size": 4,
    "pixel_attn_hidden_size": 64, "pixel_num_groups": 2, "patch_depth": 3, "pixel_depth": 1, "patch_size": 16,
    "txt_embed_dim": 64, "txt_max_length": 32,
}  # fmt: skip
Z_IMAGE_PIXELS = {
    **Z_IMAGE, "image_model": "zimage_pixel", "patch_size": 16, "in_channels": 3, "decoder_in_channels": 768,
    "decoder_hidden_size": 32, "decoder_num_res_blocks": 2, "decoder_max_freqs": 4,
}  # fmt: skip


def byt5(given: Given) -> dict:
    """The glyph encoder's tokens."""
    return {"conditioning_byt5small": given.noise(given.shape[0], 5, 1472)}


def padded(given: Given) -> dict:
    """The prompt's last tokens are padding."""
    import torch

    mask = torch.ones(given.shape[0], given.case.tokens, dtype=torch.long)
    mask[:, -3:] = 0
    return {"attention_mask": mask}


def unpadded(given: Given) -> dict:
    """Some models count the prompt's tokens in its mask."""
    import torch

    return {"attention_mask": torch.ones(given.shape[0], given.case.tokens, dtype=torch.long)}


def unpadded_with_references(given: Given) -> dict:
    return {**unpadded(given), **references(given)}


def small_adapter(network) -> None:
    """Anima's text adapter has a fixed size of 130 million weights."""
    import comfy.ldm.anima.model
    import comfy.ops

    network.llm_adapter = comfy.ldm.anima.model.LLMAdapter(
        source_dim=64, target_dim=64, model_dim=64, num_layers=1, num_heads=2, operations=comfy.ops.disable_weight_init
    )  # fmt: skip


def t5_tokens(given: Given) -> dict:
    import torch

    return {"t5xxl_ids": torch.arange(9, dtype=torch.int), "t5xxl_weights": torch.ones(9)}


def llama(given: Given) -> dict:
    return {"conditioning_llama3": given.noise(given.shape[0], 2, given.case.tokens, 64)}


def bilingual(given: Given) -> dict:
    import torch

    ones = torch.ones
    return {
        "conditioning_mt5xl": given.noise(given.shape[0], 9, 48), "attention_mask": ones(given.shape[0], 16),
        "attention_mask_mt5xl": ones(given.shape[0], 9),
    }  # fmt: skip


def size_in_pixels(given: Given) -> dict:
    return {"width": given.shape[-1] * 8, "height": given.shape[-2] * 8}


def o1_tokens(given: Given) -> dict:
    import torch

    return {"text_input_ids": torch.randint(0, 1000, (1, 9), generator=given.generator)}


def low_quality(given: Given) -> dict:
    """What the decoder PiD starts from: the latent of a picture a quarter as wide."""
    import torch

    batch, _, rows, columns = given.shape
    return {
        "lq_latent": given.noise(batch, 16, rows // 32, columns // 32),
        "degrade_sigma": torch.tensor([0.1]),
    }


def regions(given: Given) -> dict:
    """Which tokens may look at which, as regional prompts and Redux say it: [1, L, L] over text and image."""
    rows, columns = (-(-side // 2) for side in given.shape[-2:])
    length = given.case.tokens + rows * columns
    return {"attention_mask": given.noise(1, length, length), "attention_mask_img_shape": (rows, columns)}


def references_at(method: str):
    return lambda given: {**references(given), "reference_latents_method": method}


VIDEO_SHAPED = (16, 1, 16, 16)  # one frame of a video model's latent

CASES = [
    Tiny("flux", "Flux", FLUX, pooled=32, cfg=1.0, detected=True),
    Tiny("flux_kontext", "Flux", FLUX, pooled=32, cfg=1.0, detected=True, extra=references),
    Tiny("flux_masked", "Flux", FLUX, pooled=32, cfg=1.0, detected=True, extra=regions),
    Tiny("flux_schnell", "FluxSchnell", {**FLUX, "guidance_embed": False}, pooled=32, cfg=1.0, detected=True),
    Tiny("flux_inpaint", "FluxInpaint", {**FLUX, "in_channels": 96}, pooled=32, cfg=1.0, detected=True),
    Tiny("longcat", "LongCatImage", {**FLUX, "guidance_embed": False, "vec_in_dim": None, "context_in_dim": 3584,
                                     "txt_ids_dims": [1, 2]}, text=3584, detected=True),
    Tiny("ovis", "FluxSchnell", {**FLUX, "guidance_embed": False, "vec_in_dim": None, "yak_mlp": True,
                                 "txt_norm": True, "txt_ids_dims": [1, 2]}, detected=True),
    Tiny("flux2", "Flux2", FLUX2, (128, 8, 8), cfg=1.0, detected=True),
    Tiny("flux2_edit", "Flux2", FLUX2, (128, 8, 8), cfg=1.0, detected=True, extra=references),
    Tiny("chroma", "Chroma", CHROMA),
    Tiny("chroma_radiance", "ChromaRadiance", RADIANCE, (3, 128, 128)),
    Tiny("qwen_image", "QwenImage", QWEN, VIDEO_SHAPED),
    Tiny("qwen_image_masked", "QwenImage", QWEN, VIDEO_SHAPED, extra=padded),
    Tiny("qwen_image_edit", "QwenImage", QWEN, VIDEO_SHAPED, extra=references),
    Tiny("qwen_image_edit_2511", "QwenImage", {**QWEN, "default_ref_method": "index_timestep_zero"}, VIDEO_SHAPED,
         extra=references),
    Tiny("qwen_image_layered", "QwenImage", {**QWEN, "use_additional_t_cond": True,
                                             "default_ref_method": "negative_index"}, (16, 3, 8, 8)),
    Tiny("lumina2", "Lumina2", LUMINA),
    Tiny("newbie", "Lumina2", {**LUMINA, "clip_text_dim": 48}, pooled=48),
    Tiny("z_image", "ZImage", Z_IMAGE, (16, 16, 20)),
    Tiny("z_image_omni", "ZImage", {**Z_IMAGE, "siglip_feat_dim": 48}, extra=references, odd=False),
    Tiny("krea2", "Krea2", KREA, VIDEO_SHAPED, text=80, detected=True),
    Tiny("krea2_edit", "Krea2", KREA, VIDEO_SHAPED, text=80, detected=True, since="0.30", extra=references_at("index")),
    Tiny("hunyuan_image", "HunyuanImage21", HUNYUAN_IMAGE, (64, 8, 8), detected=True, extra=byt5),
    Tiny("hunyuan_image_masked", "HunyuanImage21", HUNYUAN_IMAGE, (64, 8, 8), detected=True, extra=padded, cfg=1.0,
         pairs=False),
    Tiny("anima", "Anima", {**PREDICT2, "image_model": "anima"}, VIDEO_SHAPED, shrink=small_adapter,
         extra=t5_tokens),
    Tiny("cosmos_predict2", "CosmosT2IPredict2", PREDICT2, VIDEO_SHAPED),
    Tiny("sd3", "SD3", SD3, pooled=48, detected=True),
    Tiny("sd35_medium", "SD3", {**SD3, "x_block_self_attn_layers": [0, 1]}, pooled=48, detected=True),
    Tiny("auraflow", "AuraFlow", AURA, (4, 16, 16)),
    Tiny("mage_flow", "MageFlow", MAGE, (128, 8, 8)),
    Tiny("mage_flow_edit", "MageFlow", MAGE, (128, 8, 8), extra=references),
    Tiny("joy_image", "JoyImage", JOY, VIDEO_SHAPED),
    Tiny("joy_image_edit", "JoyImage", JOY, VIDEO_SHAPED, extra=references),
    Tiny("lens", "Lens", LENS, (128, 8, 8), detected=True),
    Tiny("lens_masked", "Lens", LENS, (128, 8, 8), detected=True, extra=padded),
    Tiny("kandinsky5_image", "Kandinsky5Image", KANDINSKY, text=3584, pooled=768, odd=False),
    Tiny("ideogram4", "Ideogram4", IDEOGRAM, (128, 8, 8), since="0.30"),
    Tiny("ideogram4_masked", "Ideogram4", IDEOGRAM, (128, 8, 8), since="0.30", extra=padded),
    Tiny("omnigen2", "Omnigen2", OMNIGEN, extra=unpadded, pairs=False),
    Tiny("omnigen2_edit", "Omnigen2", OMNIGEN, extra=unpadded_with_references, pairs=False),
    Tiny("boogu", "Boogu", BOOGU, extra=unpadded, pairs=False),
    Tiny("boogu_edit", "Boogu", BOOGU, extra=unpadded_with_references, pairs=False),
    Tiny("ernie", "ErnieImage", ERNIE, (128, 8, 8), why="not told"),
    Tiny("hidream", "HiDream", HIDREAM, pooled=48, extra=llama, why="is not known"),
    Tiny("hidream_o1", "HiDreamO1", HIDREAM_O1, (3, 128, 128), text=None, extra=o1_tokens, why="from step to step"),
    Tiny("pixart_sigma", "PixArtSigma", PIXART, (4, 40, 40), why="is not known"),
    Tiny("pixart_alpha", "PixArtAlpha", {**PIXART, "image_model": "pixart_alpha", "micro_condition": True},
         (4, 40, 40), extra=size_in_pixels, why="is not known"),
    Tiny("hunyuan_dit", "HunyuanDiT", HYDIT, (4, 16, 16), extra=bilingual, why="is not known"),
    Tiny("hunyuan_dit1", "HunyuanDiT1", {**HYDIT, "image_model": "hydit1", "size_cond": True,
                                         "use_style_cond": True}, (4, 16, 16), extra=bilingual, why="is not known"),
    Tiny("pixeldit", "PixelDiTT2I", PIXELDIT, (3, 64, 64), why="is not known"),
    Tiny("pid", "PiD", {**PIXELDIT, "image_model": "pid", "lq_hidden_dim": 16, "lq_num_res_blocks": 1},
         (3, 128, 128), extra=low_quality, why="is not known"),
    Tiny("z_image_pixels", "ZImagePixelSpace", Z_IMAGE_PIXELS, (3, 128, 128)),
]  # fmt: skip

NOT_SAMPLED: dict[str, str] = {}
