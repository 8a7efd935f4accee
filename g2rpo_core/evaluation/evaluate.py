"""The images of a batch of test prompts, and their rows of scores."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from g2rpo_core.common.seeding import seed_of
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.evaluation import image_stats
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.scoring import score_table
from g2rpo_core.rewards.spec import Reward


def evaluate_batch(
    policy: Policy,
    store: EmbeddingStore,
    rewards: Mapping[str, Reward],
    settings: EvaluationSettings,
    sigmas: Sequence[float],
    number: int,
    trained_share: float,
) -> tuple[list[Prompt], torch.Tensor, pd.DataFrame]:
    """The prompts of a batch, their images [n, 3, H, W], and rows as in `score_table`: rewards, image statistics, diversity."""

    def images_of(count: int, seed: int) -> tuple[list[Prompt], torch.Tensor]:
        (batch,) = generate_images(policy, store, count, sigmas, seed, settings.batch, [number], trained_share)
        return batch

    prompts, images = images_of(len(store), settings.seed)
    rows = [score_table({**rewards, **image_stats.MEASURES}, prompts, images)]
    diversity = settings.diversity
    if diversity and number * settings.batch < diversity.prompts:
        again = [images_of(diversity.prompts, seed_of("diversity", settings.seed, turn)) for turn in range(diversity.noises)]
        distances = image_stats.diversity(torch.stack([images for _, images in again]))  # of [noises, n, 3, H, W]
        rows.append(score_table({"diversity": lambda *_: distances}, *again[0]))
    return prompts, images, pd.concat(rows)
