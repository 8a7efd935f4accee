"""HPS-v2.1: the cosine of image and prompt under an open_clip model, without its logit scale."""

from pathlib import Path
from typing import Literal

import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards import packages
from g2rpo_core.rewards.cosine import CosineScore, of_open_clip
from g2rpo_core.rewards.preprocess import Preprocess
from g2rpo_core.rewards.spec import VIT_H_14, BackendSettings, Reward, RewardSpec, ScorerSettings

DEFAULT = ScorerSettings()


class HPSSettings(BackendSettings):
    """backend: hpsv2 is the package itself."""

    backend: Literal["native", "hpsv2"] = "native"


def hps(folder: Path, device: torch.device, architecture: str, settings: ScorerSettings = DEFAULT) -> CosineScore:
    """HPS-v2.1 from `HPS_v2.1_compressed`, .pt or .safetensors.

    architecture: a name in open_clip, or a file beside the weights.
    """
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    if architecture.endswith(".json"):
        open_clip.add_model_config(folder / architecture)
    name = architecture.removesuffix(".json")
    (weights,) = folder.glob("HPS_v2.1_compressed.*")
    model = open_clip.create_model(name, pretrained=str(weights), precision="fp32", weights_only=True)
    preprocess = Preprocess(model.visual.image_size[0], "pad", OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, rgb="first")
    return of_open_clip(model, open_clip.get_tokenizer(name), preprocess, device, settings)


def _build(models: ModelStore, device: torch.device, settings: HPSSettings) -> Reward:
    if settings.backend == "hpsv2":
        packages.check_installed("hpsv2", "rewards.hps.backend")
        score = packages.hpsv2(models.folder("hps"), models.entry("hps")["architecture"], device)
        return packages.PackageReward(score, rgb_first=True)
    return hps(models.folder("hps"), device, models.entry("hps")["architecture"], settings)


SPEC = RewardSpec(
    "hps", "HPS-v2.1", _build, settings=HPSSettings, models=("hps",), open_clip=("hps",), size=VIT_H_14,
    aliases=("hps_v2_1", "hps-v2.1"),
)  # fmt: skip
