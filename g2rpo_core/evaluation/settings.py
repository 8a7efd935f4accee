"""The section `evaluation` of a profile."""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.settings import Settings


class DiversitySettings(Settings):
    """How the diversity within a prompt is measured: on so many of the first prompts, with so many noises each."""

    prompts: PositiveInt
    noises: int = Field(ge=2)


class EvaluationSettings(Settings):
    """Which images of the test prompts are made, and by which rewards they are scored."""

    how = frozenset({"processes"})

    steps: tuple[PositiveInt, ...] = Field(min_length=1, description="numbers of steps; reports are about the first")
    height: PositiveInt
    width: PositiveInt
    rewards: tuple[str, ...] = Field(min_length=1)
    seed: int
    batch: PositiveInt
    checkpoints: tuple[Literal["final"] | PositiveInt, ...] = Field(
        ("final",),
        min_length=1,
        description="of every run: the last weights, or iterations of training.snapshots; reports are about the first",
    )
    diversity: DiversitySettings | None = Field(None, description="null: it is not measured")
    trained_share: float = Field(
        1.0, ge=0, le=1, description="share of the steps, from the noisy end, by the trained weights; the base does the others"
    )
    processes: Processes = Field(1, description="as training.processes")

    @field_validator("steps", "checkpoints")
    @classmethod
    def _different(cls, value):
        if len(set(value)) < len(value):
            raise ValueError("must be different from each other")
        return value
