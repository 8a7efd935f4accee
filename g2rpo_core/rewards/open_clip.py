"""HPS-v2.1 and CLIP Score: the cosine of picture and prompt under an open_clip model, without its logit scale."""

import json
from collections.abc import Sequence
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torchvision.transforms.v2 import functional as TF

MICRO_BATCH = 256


class CosineScore:
    """Cosine similarity, [N] float32 in [-1, 1].

    resize: how a picture comes to the model's square: `squash` changes its aspect, `pad` scales the longest side and pads
    with black, as hpsv2 does. Texts are encoded once and kept.
    """

    def __init__(
        self, model: torch.nn.Module, tokenize, resize: str, mean: Sequence[float], std: Sequence[float], device: torch.device
    ):
        self.model, self.tokenize, self.resize, self.device = (
            model.eval().requires_grad_(False).to(device),
            tokenize,
            resize,
            device,
        )
        self.size = model.visual.image_size[0]
        self.mean, self.std = list(mean), list(std)
        self._texts: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} pictures and {len(prompts)} prompts; need one prompt a picture")
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        for start in range(0, len(new), MICRO_BATCH):
            part = new[start : start + MICRO_BATCH]
            self._texts.update(zip(part, self.model.encode_text(self.tokenize(part).to(self.device), normalize=True)))
        texts = torch.stack([self._texts[prompt] for prompt in prompts])
        parts = [self.model.encode_image(self.preprocess(part), normalize=True) for part in images.split(MICRO_BATCH)]
        return (torch.cat(parts) * texts).sum(1).float()

    def preprocess(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] in [0, 1] -> [N, 3, size, size], normalized."""
        images = images.to(self.device, torch.float32)
        height, width = images.shape[-2:]
        if self.resize == "squash":
            shape = [self.size, self.size]
        else:
            scale = self.size / max(height, width)
            shape = [round(height * scale), round(width * scale)]
        if shape != [height, width]:
            images = TF.resize(images, shape, TF.InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)
        down, right = self.size - shape[0], self.size - shape[1]
        images = F.pad(images, (right // 2, right - right // 2, down // 2, down - down // 2))
        return TF.normalize(images, self.mean, self.std)


def hps(folder: Path, device: torch.device, architecture: str) -> CosineScore:
    """HPS-v2.1 from `HPS_v2.1_compressed`, .pt or .safetensors; its architecture is a name of open_clip's, or a file beside it."""
    if architecture.endswith(".json"):
        open_clip.add_model_config(folder / architecture)
    name = architecture.removesuffix(".json")
    (weights,) = folder.glob("HPS_v2.1_compressed.*")
    model = open_clip.create_model(name, pretrained=str(weights), precision="fp32", weights_only=True)
    return CosineScore(model, open_clip.get_tokenizer(name), "pad", OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, device)


def clip_score(folder: Path, device: torch.device) -> CosineScore:
    """CLIP Score from a folder with `open_clip_config.json` and weights, as `apple/DFN5B-CLIP-ViT-H-14` is published."""
    name = f"local-dir:{folder}"
    config = json.loads((folder / "open_clip_config.json").read_text())["preprocess_cfg"]
    model = open_clip.create_model(name, precision="fp32", weights_only=True)
    return CosineScore(model, open_clip.get_tokenizer(name), "squash", config["mean"], config["std"], device)
