"""HPS-v2.1: the cosine of image and prompt under an open_clip model, without its logit scale."""

from pathlib import Path

import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.cosine import CosineScore, of_open_clip
from g2rpo_core.rewards.preprocess import Preprocess
from g2rpo_core.rewards.spec import VIT_H_14, RewardSpec, ScorerSettings

DEFAULT = ScorerSettings()


def hps(folder: Path, device: torch.device, architecture: str, settings: ScorerSettings = DEFAULT) -> CosineScore:
    """From `HPS_v2.1_compressed`, .pt or .safetensors; its architecture is a name of open_clip's, or a file beside it."""
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    if architecture.endswith(".json"):
        open_clip.add_model_config(folder / architecture)
    name = architecture.removesuffix(".json")
    (weights,) = folder.glob("HPS_v2.1_compressed.*")
    model = open_clip.create_model(name, pretrained=str(weights), precision="fp32", weights_only=True)
    preprocess = Preprocess(model.visual.image_size[0], "pad", OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, rgb="first")
    return of_open_clip(model, open_clip.get_tokenizer(name), preprocess, device, settings)


def _build(models: ModelStore, device: torch.device, settings: ScorerSettings) -> CosineScore:
    return hps(models.folder("hps"), device, models.entry("hps")["architecture"], settings)


SPEC = RewardSpec(
    "hps", "HPS-v2.1", _build, models=("hps",), open_clip=("hps",), size=VIT_H_14, aliases=("hps_v2_1", "hps-v2.1")
)  # fmt: skip
