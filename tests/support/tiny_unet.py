"""Entries of the table in tiny_models.py: UNets, and Stable Cascade's two stages."""

from __future__ import annotations

from types import SimpleNamespace

from tiny_models import Given, Tiny

UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "legacy": False,
    "use_spatial_transformer": True, "use_temporal_attention": False, "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 2, 2], "num_heads": -1, "num_head_channels": 32, "context_dim": 64, "num_classes": None,
    "adm_in_channels": None,
}  # fmt: skip
SHALLOW = {
    **UNET, "transformer_depth": [1, 1, 0], "transformer_depth_output": [1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1, "use_linear_in_transformer": False,
}  # fmt: skip
LINEAR = {**SHALLOW, "use_linear_in_transformer": True}


def pooled(width: int, sizes: int) -> dict:
    """Options of a UNet that also takes a pooled prompt and embedded sizes."""
    return {"num_classes": "sequential", "adm_in_channels": width + sizes * 256}


SDXL = {
    **UNET, **pooled(48, 6), "transformer_depth": [0, 1, 3], "transformer_depth_output": [0, 0, 1, 1, 3, 3],
    "transformer_depth_middle": 3, "use_linear_in_transformer": True,
}  # fmt: skip
NO_MIDDLE = {
    "transformer_depth": [0, 1, 2], "transformer_depth_output": [0, 0, 1, 1, 2, 2], "transformer_depth_middle": -1,
}  # fmt: skip
VIDEO = {
    **LINEAR, "in_channels": 8, "num_classes": "sequential", "use_temporal_attention": True,
    "use_temporal_resblock": True, "extra_ff_mix_layer": True, "merge_strategy": "learned_with_images",
    "merge_factor": 0.0, "video_kernel_size": [3, 1, 1],
}  # fmt: skip
CASCADE_C = {
    "stable_cascade_stage": "c", "c_cond": 64, "c_hidden": [64, 64], "nhead": [2, 2], "blocks": [[1, 1], [1, 1]],
    "c_clip_text": 64, "c_clip_text_pooled": 48,
}  # fmt: skip
CASCADE_B = {
    "stable_cascade_stage": "b", "c_cond": 64, "c_hidden": [32, 32, 64, 64], "nhead": [-1, -1, 2, 2],
    "blocks": [[1, 1, 1, 1], [1, 1, 1, 1]], "block_repeat": [[1, 1, 1, 1], [1, 1, 1, 1]], "c_clip": 48,
}  # fmt: skip


def seen_image(width: int):
    """The image that an unCLIP model starts from, as its vision encoder gives it."""

    def extra(given: Given) -> dict:
        output = SimpleNamespace(image_embeds=given.noise(1, width).unsqueeze(0))
        return {"unclip_conditioning": [{"clip_vision_output": output, "strength": 1.0, "noise_augmentation": 0.1}]}

    return extra


def given_image(given: Given) -> dict:
    return {"concat_latent_image": given.noise(*given.shape)}


def small_image(given: Given) -> dict:
    batch, _, rows, columns = given.shape
    return {"concat_image": given.noise(batch, 3, rows, columns), "noise_augmentation": 0.1}


SHAPE = (4, 16, 16)

CASES = [
    Tiny("sd15", "SD15", SHALLOW, SHAPE),
    Tiny("sd15_inpaint", "SD15", {**SHALLOW, "in_channels": 9}, SHAPE),
    Tiny("sd15_ip2p", "SD15_instructpix2pix", {**SHALLOW, "in_channels": 8}, SHAPE, extra=given_image),
    Tiny("sd20", "SD20", LINEAR, SHAPE),
    Tiny("sd21_unclip_l", "SD21UnclipL", {**LINEAR, "num_classes": "sequential", "adm_in_channels": 1536}, SHAPE,
         extra=seen_image(768)),
    Tiny("sd21_unclip_h", "SD21UnclipH", {**LINEAR, "num_classes": "sequential", "adm_in_channels": 2048}, SHAPE,
         extra=seen_image(1024)),
    Tiny("lotus", "LotusD", {**LINEAR, "num_classes": "sequential", "adm_in_channels": 4}, SHAPE, cfg=1.0),
    Tiny("sdxl", "SDXL", SDXL, SHAPE, pooled=48),
    Tiny("sdxl_ip2p", "SDXL_instructpix2pix", {**SDXL, "in_channels": 8}, SHAPE, pooled=48, extra=given_image),
    Tiny("sdxl_refiner", "SDXLRefiner", {**SDXL, **pooled(48, 5)}, SHAPE, pooled=48),
    Tiny("ssd1b", "SSD1B", {**SDXL, **NO_MIDDLE}, SHAPE, pooled=48),
    Tiny("segmind_vega", "Segmind_Vega", {**SDXL, **NO_MIDDLE}, SHAPE, pooled=48),
    Tiny("koala_700m", "KOALA_700M", {**SDXL, **NO_MIDDLE}, SHAPE, pooled=48),
    Tiny("koala_1b", "KOALA_1B", SDXL, SHAPE, pooled=48),
    Tiny("svd", "SVD_img2vid", {**VIDEO, "adm_in_channels": 768}, SHAPE, tokens=1, batch=3, extra=given_image,
         why="attend over time"),
    Tiny("sv3d_u", "SV3D_u", {**VIDEO, "adm_in_channels": 256}, SHAPE, tokens=1, batch=3, extra=given_image,
         why="attend over time"),
    Tiny("sv3d_p", "SV3D_p", {**VIDEO, "adm_in_channels": 1280}, SHAPE, tokens=1, batch=3, extra=given_image,
         why="attend over time"),
    Tiny("zero123", "Stable_Zero123", {**SHALLOW, "in_channels": 8}, SHAPE, extra=given_image,
         weights={"cc_projection.weight": (64, 64), "cc_projection.bias": (64,)}),
    Tiny("x4_upscaler", "SD_X4Upscaler", {**LINEAR, "in_channels": 7, "num_classes": 1000,
                                          "disable_self_attentions": [True, False, False]}, SHAPE,
         extra=small_image),
    Tiny("cascade_c", "Stable_Cascade_C", CASCADE_C, (16, 12, 12), pooled=48, why="is not known"),
    Tiny("cascade_b", "Stable_Cascade_B", CASCADE_B, (4, 32, 32), pooled=48, why="is not known"),
]  # fmt: skip

NOT_SAMPLED: dict[str, str] = {}
