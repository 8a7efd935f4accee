"""The strength of an exported LoRA, where other programs look for it."""

from collections.abc import Mapping

import torch


def with_alpha(lora: Mapping[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """diffusers' LoRA (`transformer.<module>.lora_A.weight`, ...) with `<module>.alpha`, where ComfyUI and diffusers look for it.

    A program that reads neither this nor the file's metadata would apply rank / alpha times the trained strength.
    """
    alphas = {key.replace(".lora_A.weight", ".alpha"): torch.tensor(alpha) for key in lora if key.endswith(".lora_A.weight")}
    return {**lora, **alphas}


def with_alpha_in_weights(lora: Mapping[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """The same strength without any alpha: every second matrix times alpha / rank, which loaders then take as it is."""
    rank = {key.replace(".lora_A.weight", ".lora_B.weight"): len(value) for key, value in lora.items() if ".lora_A." in key}
    return {key: value * (alpha / rank[key]) if key in rank else value for key, value in lora.items()}
