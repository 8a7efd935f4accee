"""Shapes of parts that published base models share: config.json of their text encoders and VAEs."""

from typing import Any

CLIP_L: dict[str, Any] = {  # openai/clip-vit-large-patch14's text encoder
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "max_position_embeddings": 77,
}  # fmt: skip
CLIP_G: dict[str, Any] = {  # laion/CLIP-ViT-bigG-14-laion2B-39B-b160k's
    "vocab_size": 49408, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "max_position_embeddings": 77, "hidden_act": "gelu",
}  # fmt: skip
T5_XXL: dict[str, Any] = {  # the encoder of google/t5-v1_1-xxl
    "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
VAE_16: dict[str, Any] = {  # of 16 channels, at an eighth of the size; the latents' mean and deviation differ from model to model
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
