"""Where the files of the shipped workflows can be had: {name: (folder, path)}."""

HOST = "https://huggingface.co/"
MODELS = {
    "sd_xl_base_1.0.safetensors": (
        "checkpoints",
        "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors",
    ),
    "flux1-dev.safetensors": ("diffusion_models", "Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors"),
    "flux1-dev-kontext_fp8_scaled.safetensors": (
        "diffusion_models",
        "Comfy-Org/flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/"
        "flux1-dev-kontext_fp8_scaled.safetensors",
    ),
    "clip_l.safetensors": (
        "text_encoders",
        "comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors",
    ),
    "t5xxl_fp16.safetensors": (
        "text_encoders",
        "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors",
    ),
    "t5xxl_fp8_e4m3fn_scaled.safetensors": (
        "text_encoders",
        "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp8_e4m3fn_scaled.safetensors",
    ),
    "z_image_turbo_bf16.safetensors": (
        "diffusion_models",
        "Comfy-Org/z_image_turbo/resolve/main/split_files/diffusion_models/z_image_turbo_bf16.safetensors",
    ),
    "qwen_3_4b.safetensors": (
        "text_encoders",
        "Comfy-Org/z_image_turbo/resolve/main/split_files/text_encoders/qwen_3_4b.safetensors",
    ),
    "qwen_image_fp8_e4m3fn.safetensors": (
        "diffusion_models",
        "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_fp8_e4m3fn.safetensors",
    ),
    "qwen_2.5_vl_7b_fp8_scaled.safetensors": (
        "text_encoders",
        "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
    ),
    "qwen_image_vae.safetensors": (
        "vae",
        "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/vae/qwen_image_vae.safetensors",
    ),
    "wan2.1_t2v_1.3B_fp16.safetensors": (
        "diffusion_models",
        "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/diffusion_models/"
        "wan2.1_t2v_1.3B_fp16.safetensors",
    ),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": (
        "text_encoders",
        "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/text_encoders/"
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    ),
    "wan_2.1_vae.safetensors": (
        "vae",
        "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/vae/wan_2.1_vae.safetensors",
    ),
    "ae.safetensors": (
        "vae",
        "Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors",
    ),
}
