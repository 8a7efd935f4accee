"""Reward models and text encoders in their published configurations, without memory.

Configurations are those of the repositories' config.json; counts are those of the published files'
bytes.
"""

import json
import re
from functools import partial

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLModel,
    T5Config,
    T5EncoderModel,
)

from g2rpo_core.architectures.flux import TRANSFORMER
from g2rpo_core.rewards.hpsv3 import RENAMED, SPEC, HPSv3Model
from g2rpo_core.rewards.image_reward import from_checkpoint
from g2rpo_core.rewards.packages import image_reward_model
from pipeline.rehearsal.inputs import PICKSCORE
from tests.fixtures.hpsv3_package import hpsv3_model

pytestmark = pytest.mark.pipeline

CLIP_L = {  # text_encoder/config.json of FLUX.1-dev: openai/clip-vit-large-patch14's text
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "projection_dim": 768,
}
T5_XXL = {  # text_encoder_2/config.json of FLUX.1-dev: google/t5-v1_1-xxl's encoder
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "feed_forward_proj": "gated-gelu",
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 32128,
    "tie_word_embeddings": False,
}
MED = {  # med_config.json of zai-org/ImageReward
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30524,
    "encoder_width": 768,
    "add_cross_attention": True,
}
VIT_L = {
    "img_size": 224,
    "patch_size": 16,
    "embed_dim": 1024,
    "depth": 24,
    "num_heads": 16,
}  # blip.create_vit("large", 224)
QWEN = {  # config.json of Qwen2.5-VL-7B-Instruct, on which UnifiedReward-qwen-7b is trained
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
    "image_token_id": 151655,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
}


@pytest.fixture(autouse=True)
def without_memory():
    with torch.device("meta"), torch.no_grad():
        yield


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_pickscore():
    model = CLIPModel(CLIPConfig(**PICKSCORE))
    assert count(model) == 986_109_441  # 3.94 GB in float32
    images = model.get_image_features(torch.empty(2, 3, 224, 224)).pooler_output
    texts = model.get_text_features(torch.zeros(2, 77, dtype=torch.int64)).pooler_output
    assert images.shape == texts.shape == (2, 1024)


def test_the_text_encoders_of_flux():
    t5, clip = T5EncoderModel(T5Config(**T5_XXL)), CLIPTextModel(CLIPTextConfig(**CLIP_L))
    assert (count(t5), count(clip)) == (4_762_310_656, 123_060_480)
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    assert t5(tokens).last_hidden_state.shape == (1, 512, TRANSFORMER["joint_attention_dim"])
    assert clip(tokens[:, :77]).pooler_output.shape == (1, TRANSFORMER["pooled_projection_dim"])


def test_image_reward(tmp_path, monkeypatch):
    """Every weight of the published package's model has its place in ours, and none is left."""
    monkeypatch.setattr(
        torch, "linspace", partial(torch.linspace, device="cpu")
    )  # the package reads numbers of one when it builds
    (tmp_path / "med_config.json").write_text(json.dumps(MED))
    published = image_reward_model(
        tmp_path / "med_config.json", None, VIT_L, MED["hidden_size"]
    ).state_dict()
    size = 4 * sum(value.numel() for value in published.values())
    assert (
        0 < 1_786_880_927 - size < 500_000
    )  # ImageReward.pt, whose names and records take some bytes more
    model = from_checkpoint(published, MED)  # strict
    config = model.vision.config
    assert (config.image_size, config.num_hidden_layers, config.num_attention_heads) == (
        224,
        24,
        16,
    )
    assert model.vision(torch.empty(2, 3, 224, 224)).last_hidden_state.shape == (
        2,
        197,
        config.hidden_size,
    )
    assert model.head(torch.empty(2, model.text.config.hidden_size)).shape == (2, 1)
    with pytest.raises(RuntimeError, match="head.0.weight"):
        from_checkpoint(
            {key: value for key, value in published.items() if key != "mlp.layers.0.weight"}, MED
        )


def test_unified_reward():
    """A flat configuration, as published."""
    config = Qwen2_5_VLConfig(**QWEN)
    model = Qwen2_5_VLForConditionalGeneration(config)
    assert count(model) == 8_292_166_656  # 16.58 GB in bfloat16
    assert (
        config.text_config.num_hidden_layers == 28
        and config.vision_config.out_hidden_size == config.text_config.hidden_size
    )


def test_hpsv3():
    """Every weight of the package's model but the output layer's; 151,658 tokens with its own."""
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
    }
    flat = {key: value for key, value in QWEN.items() if key != "vision_config"} | {
        "max_position_embeddings": 32768
    }
    config = Qwen2VLConfig(**flat | {"vocab_size": 151_658, "vision_config": vision})
    model = HPSv3Model(Qwen2VLModel(config), 151_657)
    assert count(model) == SPEC.size.parameters == 7_748_610_610
    published = {
        key: value.shape for key, value in hpsv3_model(config, 151_657).state_dict().items()
    }
    assert published.pop("lm_head.weight") == (151_658, 3584)
    renamed = {}
    for key, shape in published.items():
        for pattern, replacement in RENAMED:
            key = re.sub(pattern, replacement, key)
        renamed[key] = shape
    assert renamed == {key: value.shape for key, value in model.state_dict().items()}
