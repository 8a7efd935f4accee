"""What an evaluation records: columns, folders of images, image statistics, and reported rows."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.tables import COUNT, NUMBER, TEXT, or_null

if TYPE_CHECKING:
    import pandas as pd

SCORES = {  # column -> what it holds
    "method": TEXT,
    "seed": COUNT,
    "checkpoint": TEXT,
    "steps": COUNT,
    "prompt_id": TEXT,
    "style": TEXT,
    "reward": TEXT,
    "score": or_null(NUMBER),
    "reason": or_null(TEXT),
}


def image_folder(checkpoint: str | int, steps: int) -> str:
    """Return the folder of a checkpoint's images in `steps` steps, within an evaluation's."""
    return f"pictures/{checkpoint}-{steps}"


def chosen(results: "pd.DataFrame", checkpoint: str | int, steps: int) -> "pd.DataFrame":
    """Return the rows of a checkpoint and number of steps.

    A model without that checkpoint, such as the base, keeps the rows that it has.
    """
    rows = results[results.steps == steps]
    there = rows.checkpoint == str(checkpoint)
    return rows[there | ~rows.method.isin(rows.method[there])]


def reported(results: "pd.DataFrame", settings: EvaluationSettings) -> "pd.DataFrame":
    """Return the rows that reports use: the first checkpoint and the first number of steps."""
    return chosen(results, settings.checkpoints[0], settings.steps[0])


def reported_means(results: "pd.DataFrame", settings: EvaluationSettings) -> dict[str, float]:
    """Return each reward's mean over the rows that reports use."""
    means = reported(results, settings).groupby("reward", sort=False).score.mean()
    return {reward: float(means[reward]) for reward in settings.rewards}


def measure_saturation(images: torch.Tensor, prompts: Sequence[str] = ()) -> torch.Tensor:
    """Compute HSV's saturation of images [N, 3, H, W] in [0, 1]: [N] in [0, 1].

    Means over pixels; black counts as 0.
    """
    most, least = images.amax(1), images.amin(1)
    return ((most - least) / most.clamp_min(1e-6)).mean((1, 2))


def measure_sharpness(images: torch.Tensor, prompts: Sequence[str] = ()) -> torch.Tensor:
    """Compute the Laplacian's standard deviation of images [N, 3, H, W] in [0, 1]: [N].

    On their luminance of Rec. 601.
    """
    luminance = (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(
        1, keepdim=True
    )
    laplacian = luminance.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[
        None, None
    ]
    return F.conv2d(luminance, laplacian).flatten(1).std(1)


def measure_diversity(images: torch.Tensor) -> torch.Tensor:
    """Compute how far apart two images of a prompt are, from images [R, N, 3, H, W]: [N].

    Of N prompts with R >= 2 noises each. The distance is Euclidean, in units of one pixel value.
    """
    flat = images.flatten(2).transpose(0, 1)
    distances = torch.cdist(flat, flat) / flat.shape[-1] ** 0.5
    first, second = torch.triu_indices(len(images), len(images), 1)
    return distances[:, first, second].mean(1)


# Of one image, called as a reward is
MEASURES: dict[str, Callable[[torch.Tensor, Sequence[str]], torch.Tensor]] = {
    "saturation": measure_saturation,
    "sharpness": measure_sharpness,
}
LABELS = {
    "saturation": "saturation",
    "sharpness": "sharpness",
    "diversity": "diversity within a prompt",
}
