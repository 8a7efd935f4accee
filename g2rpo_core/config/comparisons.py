"""Comparisons that a study names before its runs."""

from pydantic import Field

from g2rpo_core.foundation.settings import Name, Settings

TRAINING = "training"  # the training reward


class Comparison(Settings):
    """Two entries of a study, which are expected to differ in one measure.

    It holds if the whole joint interval of the difference, paired by seed, is above -margin (`tables.compare_preregistered`).
    """

    method: Name = Field(description="the entry that is expected to be above")
    against: Name = Field(description="the other entry")
    reward: Name = Field(TRAINING, description="one of evaluation.rewards, or `training`: the training reward")
    margin: float = Field(0.0, ge=0, le=1e6, description="by how much `method` may be below and still hold; 0: it must be above")
