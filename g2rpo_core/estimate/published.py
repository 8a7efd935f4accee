"""Published shapes of the rewards' models; those of base models are in `bases`."""

from typing import Any

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
