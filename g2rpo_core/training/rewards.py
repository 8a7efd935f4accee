"""Loads the rewards that a training needs, and says which prompts they cut."""

from collections.abc import Mapping
from pathlib import Path

import torch

from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.scoring import note_cut
from g2rpo_core.rewards.spec import Reward, Section
from g2rpo_core.training.settings import TrainingSettings


def load_rewards(
    training: TrainingSettings,
    models: Path,
    device: torch.device,
    section: Section,
) -> tuple[dict[str, Reward], dict[str, Reward]]:
    """Load the rewards that are trained on, and those that score held-out images.

    The latter are all of both.
    """
    # Each once, whether trained on, measured or both: a scorer may take gigabytes
    loaded = registry.load(
        dict.fromkeys([*training.rewards, *training.monitor.rewards]),
        models,
        device,
        section,
    )
    return {reward: loaded[reward] for reward in training.rewards}, loaded


def say_what_is_cut(
    rewards: Mapping[str, Reward],
    prompts: EmbeddingStore,
    held_out: EmbeddingStore,
    measured: int,
    processes: ProcessGroup,
) -> None:
    """Say once which prompts a reward cuts, in training and the first `measured` held-out ones."""
    # Every process has all prompts, so one is enough
    if processes.rank == 0:
        note_cut(
            rewards, (prompt.text for prompt in (*prompts.prompts, *held_out.prompts[:measured]))
        )
