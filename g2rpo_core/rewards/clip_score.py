"""CLIP Score: the cosine of image and prompt under an open_clip model, without its logit scale."""

import json
from pathlib import Path

import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.cosine import CosineScore, of_open_clip
from g2rpo_core.rewards.preprocess import Preprocess
from g2rpo_core.rewards.spec import VIT_H_14, RewardSpec, ScorerSettings

DEFAULT = ScorerSettings()


def clip_score(folder: Path, device: torch.device, settings: ScorerSettings = DEFAULT) -> CosineScore:
    """CLIP Score from a folder with `open_clip_config.json` and weights, laid out like `apple/DFN5B-CLIP-ViT-H-14`."""
    import open_clip

    name = f"local-dir:{folder}"
    config = json.loads((folder / "open_clip_config.json").read_text())["preprocess_cfg"]
    model = open_clip.create_model(name, precision="fp32", weights_only=True)
    preprocess = Preprocess(model.visual.image_size[0], "squash", tuple(config["mean"]), tuple(config["std"]), rgb="last")
    return of_open_clip(model, open_clip.get_tokenizer(name), preprocess, device, settings)


def _build(models: ModelStore, device: torch.device, settings: ScorerSettings) -> CosineScore:
    return clip_score(models.folder("clip_score"), device, settings)


SPEC = RewardSpec("clip_score", "CLIP Score", _build, models=("clip_score",), size=VIT_H_14)
