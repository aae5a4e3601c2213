"""Entries of the table in tiny_models.py: models that draw sound or solids, and those that do not sample."""

from __future__ import annotations

from tiny_models import Given, Tiny

AUDIO = {
    "audio_model": "dit1.0", "global_cond_dim": 1536, "project_cond_tokens": True, "embed_dim": 64, "depth": 3,
    "num_heads": 2, "io_channels": 64, "input_concat_dim": 0, "timestep_features_type": "learned",
}  # fmt: skip
AUDIO3 = {
    **AUDIO, "global_cond_dim": 768, "io_channels": 256, "timestep_features_type": "expo", "num_memory_tokens": 4,
    "attn_kwargs": {"qk_norm": "rms", "differential": False}, "norm_type": "rms_norm", "local_add_cond_dim": 257,
    "global_cond_shared_embed": True, "global_cond_type": "adaLN",
}  # fmt: skip
ACE = {
    "audio_model": "ace", "attention_head_dim": 32, "in_channels": 8, "inner_dim": 64, "max_height": 16,
    "max_position": 1024, "max_width": 1024, "mlp_ratio": 2.5, "num_attention_heads": 2, "num_layers": 3,
    "out_channels": 8, "patch_size": [16, 1], "rope_theta": 1000000.0, "speaker_embedding_dim": 512,
    "text_embedding_dim": 64, "ssl_encoder_depths": [1, 1], "ssl_latent_dims": [16, 16],
    "ssl_names": ["mert", "m-hubert"], "lyric_encoder_vocab_size": 100, "lyric_hidden_size": 64,
}  # fmt: skip
ACE15 = {
    "audio_model": "ace1.5", "hidden_size": 64, "text_hidden_dim": 64, "num_dit_layers": 2, "num_lyric_layers": 1,
    "num_timbre_layers": 1, "num_tokenizer_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "fsq_dim": 64, "encoder_hidden_size": 64, "encoder_intermediate_size": 96,
    "encoder_num_heads": 2,
}  # fmt: skip
HUNYUAN_3D = {
    "image_model": "hunyuan3d2", "in_channels": 64, "context_in_dim": 64, "hidden_size": 64, "mlp_ratio": 4.0,
    "num_heads": 16, "depth": 2, "depth_single_blocks": 3, "qkv_bias": True, "guidance_embed": False,
}  # fmt: skip
HUNYUAN_3D_21 = {
    "image_model": "hunyuan3d2_1", "in_channels": 64, "context_dim": 64, "hidden_size": 64, "mlp_ratio": 4.0,
    "num_heads": 2, "depth": 4, "qkv_bias": False, "guidance_cond_proj_dim": None, "num_moe_layers": 2,
    "num_experts": 2, "moe_top_k": 1,
}  # fmt: skip
TRIPO = {
    "image_model": "triposplat", "q_token_length": 32, "model_channels": 64, "cond_channels": 64, "num_blocks": 2,
    "num_refiner_blocks": 1, "num_head_channels": 32,
}  # fmt: skip


def seconds(name: str, learned: bool) -> dict[str, tuple[int, ...]]:
    """Weights of the layer that embeds a length; its frequencies are learned or fixed."""
    start = f"conditioner.conditioners.{name}.embedder.embedding."
    shapes = {start + "1.weight": (768, 257 if learned else 256), start + "1.bias": (768,)}
    return {start + "0.weights": (128,), **shapes} if learned else shapes


def small_lyric_encoder(network) -> None:
    """The encoder's width is no option of the model; as it is, it has 80 million weights."""
    import comfy.ops

    network.lyric_encoder = type(network.lyric_encoder)(
        64, 64, attention_heads=2, linear_units=96, num_blocks=1, static_chunk_size=0,
        operations=comfy.ops.disable_weight_init,
    )  # fmt: skip


def lyric_tokens(given: Given) -> dict:
    import torch

    return {"conditioning_lyrics": torch.randint(0, 100, (given.shape[0], 9), generator=given.generator)}


def lyrics(given: Given) -> dict:
    return {"conditioning_lyrics": given.noise(given.shape[0], 9, 64)}


def flux2_latent(given: Given) -> dict:
    return {"reference_latents": [given.noise(given.shape[0][0], 128, 3, 4)]}


CASES = [
    Tiny("stable_audio", "StableAudio", AUDIO, (64, 32), text=768,
         weights={**seconds("seconds_start", learned=True), **seconds("seconds_total", learned=True)},
         why="is not known"),
    Tiny("stable_audio3", "StableAudio3", AUDIO3, (256, 32), text=768,
         weights=seconds("seconds_total", learned=False), why="is not known"),
    Tiny("ace_step", "ACEStep", ACE, (8, 16, 24), shrink=small_lyric_encoder, extra=lyric_tokens, why="is not known"),
    Tiny("ace_step15", "ACEStep15", ACE15, (64, 30), extra=lyrics, why="is not known"),
    Tiny("hunyuan3d", "Hunyuan3Dv2", HUNYUAN_3D, (64, 48), detected=True, why="is not known"),
    Tiny("hunyuan3d_mini", "Hunyuan3Dv2mini", {**HUNYUAN_3D, "depth": 8}, (64, 48), detected=True, why="is not known"),
    Tiny("hunyuan3d_21", "Hunyuan3Dv2_1", HUNYUAN_3D_21, (64, 48), why="is not known"),
    Tiny("triposplat", "TripoSplat", TRIPO, ((32, 16), (1, 5)), tokens=17, extra=flux2_latent, why="is not known"),
]  # fmt: skip

NO_DIFFUSION = "finds things in images: nothing is sampled"
NOT_SAMPLED = {
    "RT_DETR_v4": NO_DIFFUSION,
    "SAM3": NO_DIFFUSION,
    "SAM31": NO_DIFFUSION,
    "DepthAnything3": "measures depth: nothing is sampled",
}
