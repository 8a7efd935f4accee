"""HPS-v2.1 and CLIP Score: the cosine of picture and prompt under an open_clip model, without its logit scale."""

import json
from pathlib import Path

import open_clip
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from .cosine import CosineScore
from .pictures import Preprocess
from .settings import ScorerSettings

DEFAULT = ScorerSettings()


def hps(folder: Path, device: torch.device, architecture: str, settings: ScorerSettings = DEFAULT) -> CosineScore:
    """HPS-v2.1 from `HPS_v2.1_compressed`, .pt or .safetensors; its architecture is a name of open_clip's, or a file beside it."""
    if architecture.endswith(".json"):
        open_clip.add_model_config(folder / architecture)
    name = architecture.removesuffix(".json")
    (weights,) = folder.glob("HPS_v2.1_compressed.*")
    model = open_clip.create_model(name, pretrained=str(weights), precision="fp32", weights_only=True)
    preprocess = Preprocess(model.visual.image_size[0], "pad", OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, rgb="first")
    return _cosine(model, open_clip.get_tokenizer(name), preprocess, device, settings)


def clip_score(folder: Path, device: torch.device, settings: ScorerSettings = DEFAULT) -> CosineScore:
    """CLIP Score from a folder with `open_clip_config.json` and weights, as `apple/DFN5B-CLIP-ViT-H-14` is published."""
    name = f"local-dir:{folder}"
    config = json.loads((folder / "open_clip_config.json").read_text())["preprocess_cfg"]
    model = open_clip.create_model(name, precision="fp32", weights_only=True)
    mean, std = tuple(config["mean"]), tuple(config["std"])
    preprocess = Preprocess(model.visual.image_size[0], "squash", mean, std, rgb="last")
    return _cosine(model, open_clip.get_tokenizer(name), preprocess, device, settings)


def _cosine(
    model: torch.nn.Module, tokenize, preprocess: Preprocess, device: torch.device, settings: ScorerSettings
) -> CosineScore:
    model = model.eval().requires_grad_(False).to(device, getattr(torch, settings.dtype))
    encode_texts = lambda texts: model.encode_text(tokenize(texts).to(device))
    return CosineScore(model.encode_image, encode_texts, preprocess, device, settings=settings)
