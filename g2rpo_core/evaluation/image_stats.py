"""How images look, whatever they show: what drifts when a model learns to please a reward instead of people."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F


def saturation(images: torch.Tensor, prompts: Sequence[str] = ()) -> torch.Tensor:
    """Images [N, 3, H, W] in [0, 1] -> [N] in [0, 1]: HSV's saturation, mean over pixels; black counts as 0."""
    most, least = images.amax(1), images.amin(1)
    return ((most - least) / most.clamp_min(1e-6)).mean((1, 2))


def sharpness(images: torch.Tensor, prompts: Sequence[str] = ()) -> torch.Tensor:
    """Images [N, 3, H, W] in [0, 1] -> [N]: the Laplacian's standard deviation, of the luminance of Rec. 601."""
    luminance = (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    laplacian = luminance.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
    return F.conv2d(luminance, laplacian).flatten(1).std(1)


def diversity(images: torch.Tensor) -> torch.Tensor:
    """Images [R, N, 3, H, W] of N prompts with R noises each, R >= 2 -> [N]: how far apart two images of a prompt are."""
    flat = images.flatten(2).transpose(0, 1)
    distances = torch.cdist(flat, flat) / flat.shape[-1] ** 0.5
    first, second = torch.triu_indices(len(images), len(images), 1)
    return distances[:, first, second].mean(1)


MEASURES: dict[str, Callable[[torch.Tensor, Sequence[str]], torch.Tensor]] = {
    "saturation": saturation,
    "sharpness": sharpness,
}  # of one image, called as a reward is
LABELS = {"saturation": "saturation", "sharpness": "sharpness", "diversity": "diversity within a prompt"}
