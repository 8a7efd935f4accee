"""Score a task's own pictures of the test prompts: about what a perfect model would reach."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from g2rpo_core.data.prompts import Prompt
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.files import write_json
from g2rpo_core.rewards.scoring import score_table
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.tasks.table import find_task

CEILING = "ceiling.json"  # in the folder of the base's evaluation


def write_ceiling(
    folder: Path,
    prompts: list[Prompt],
    rewards: Mapping[str, Reward],
    settings: EvaluationSettings,
) -> None:
    """Write CEILING into the folder; nothing where `score_own_pictures` has no scores."""
    if own := score_own_pictures(prompts, rewards, settings):
        write_json(folder / CEILING, own)


def score_own_pictures(
    prompts: list[Prompt], rewards: Mapping[str, Reward], settings: EvaluationSettings
) -> dict[str, float]:
    """Return the mean score of pictures that the task of the prompts draws, by reward.

    A reward that gave no score at all is left out. {} where no task draws pictures of all these
    prompts in the size that is evaluated. What captions leave open is drawn by the seed of the
    evaluation.
    """
    try:
        task = find_task(prompts[0].text)
        scenes = [task.parse(prompt.text) for prompt in prompts]
    except ValueError:  # a prompt that is no caption
        return {}
    if set(settings.size.values()) != {task.size}:
        return {}
    rng = np.random.default_rng(settings.seed)
    images = torch.from_numpy(np.stack([task.draw(scene, rng) for scene in scenes]))
    table = pd.concat(
        score_table(rewards, prompts[start : start + len(part)], part)
        for start, part in zip(range(0, len(prompts), settings.batch), images.split(settings.batch))
    )
    means = table.groupby("reward").score.mean()  # of those that have a score
    return {name: float(means[name]) for name in rewards if pd.notna(means[name])}
