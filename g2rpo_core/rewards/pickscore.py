"""PickScore: the cosine under a transformers CLIP, times its logit scale over 100, as in the paper's tables (0.22, not 22)."""

import json
from pathlib import Path

import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.cosine import CosineScore
from g2rpo_core.rewards.preprocess import Preprocess
from g2rpo_core.rewards.spec import VIT_H_14, RewardSpec, ScorerSettings

DEFAULT = ScorerSettings()


def pickscore(folder: Path, processor: Path, device: torch.device, settings: ScorerSettings = DEFAULT) -> CosineScore:
    """PickScore from a CLIPModel's folder, laid out like `yuvalkirstain/PickScore_v1`.

    processor: the folder with the tokenizer and `preprocessor_config.json`, as `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`'s.
    """
    from transformers import AutoTokenizer, CLIPModel

    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    scale = model.logit_scale.exp().item() / 100  # before rounding: in bfloat16 it would be off by a hundredth
    model.to(device, getattr(torch, settings.dtype))
    tokenizer = AutoTokenizer.from_pretrained(processor)
    config = json.loads((processor / "preprocessor_config.json").read_text())
    length = model.config.text_config.max_position_embeddings

    def encode_texts(texts: list[str]) -> torch.Tensor:
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
        return model.get_text_features(**tokens).pooler_output

    return CosineScore(
        lambda images: model.get_image_features(images).pooler_output,
        encode_texts,
        Preprocess(
            model.config.vision_config.image_size, "crop", tuple(config["image_mean"]), tuple(config["image_std"]),
            rgb="first, on white", crop_floor=True,
        ),
        device,
        scale,
        settings,
    )  # fmt: skip


def _build(models: ModelStore, device: torch.device, settings: ScorerSettings) -> CosineScore:
    return pickscore(models.folder("pickscore"), models.folder("pickscore_processor"), device, settings)


# the size is that of its ViT-H-14
SPEC = RewardSpec("pickscore", "PickScore", _build, models=("pickscore", "pickscore_processor"), size=VIT_H_14)
