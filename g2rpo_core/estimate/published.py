"""Published shapes. FLUX.1-dev: config.json of transformer/, vae/, text_encoder/ and text_encoder_2/ of black-forest-labs/FLUX.1-dev at 3de623fc3c33."""

from typing import Any

TRANSFORMER: dict[str, Any] = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4, "scaling_factor": 0.3611,
    "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
CLIP_TEXT: dict[str, Any] = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "max_position_embeddings": 77,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
OPEN_CLIP: dict[str, Any] = {  # ViT-H-14 as open_clip has it: HPS-v2.1's and CLIP Score's architecture
    "embed_dim": 1024, "vision_cfg": {"image_size": 224, "layers": 32, "width": 1280, "head_width": 80, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24},
}  # fmt: skip
PICKSCORE: dict[str, Any] = {  # config.json of yuvalkirstain/PickScore_v1
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "hidden_act": "gelu",
        "projection_dim": 1024,
    },
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "num_hidden_layers": 32, "hidden_act": "gelu",
        "patch_size": 14, "projection_dim": 1024,
    },
}  # fmt: skip
IMAGE_REWARD_TEXT: dict[str, Any] = {  # med_config.json of zai-org/ImageReward
    "vocab_size": 30524, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 512, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip
IMAGE_REWARD_IMAGE: dict[str, Any] = {  # BLIP's ViT-L/16
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 224, "patch_size": 16,
    "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip
