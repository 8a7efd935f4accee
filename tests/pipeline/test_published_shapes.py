"""Reward models in their published configurations, without memory.

Configurations are those of the repositories' config.json; counts are those of the published files'
bytes.
"""

import json
import re
from functools import partial

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLModel,
)

from g2rpo_core.rewards.hpsv3 import RENAMED, SPEC, HPSv3Model
from g2rpo_core.rewards.image_reward import from_checkpoint
from g2rpo_core.rewards.packages import image_reward_model
from g2rpo_core.rewards.unified_reward import QWEN_7B
from tests.fixtures.hpsv3_package import hpsv3_model

pytestmark = pytest.mark.pipeline

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
    from_checkpoint(published, MED)  # strict
    with pytest.raises(RuntimeError, match="head.0.weight"):
        from_checkpoint(
            {key: value for key, value in published.items() if key != "mlp.layers.0.weight"}, MED
        )


def test_unified_reward():
    """A flat configuration, as published."""
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**QWEN))
    assert count(model) == QWEN_7B.parameters  # 16.58 GB in bfloat16


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
