"""The section `evaluation` of a profile."""

from typing import Annotated, Literal

from pydantic import Field

from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.foundation.settings import Count, Different, Pixels, Seed, Settings


class DiversitySettings(Settings):
    """How the diversity within a prompt is measured."""

    prompts: Count = Field(description="How many of the first test prompts to use.")
    noises: int = Field(ge=2, le=1000, description="Images of each prompt, from as many noises.")


class EvaluationSettings(Settings):
    """Which images of the test prompts are made, and by which rewards they are scored."""

    how = frozenset({"processes"})

    steps: Annotated[tuple[Annotated[int, Field(gt=0, le=1000)], ...], Different] = Field(
        min_length=1, description="Numbers of steps; reports use the first."
    )
    height: Pixels = Field(description="Size of images in pixels.")
    width: Pixels = Field(description="Size of images in pixels.")
    rewards: Annotated[tuple[str, ...], Different] = Field(
        min_length=1, description="Rewards that score the images, in the report's order."
    )
    seed: Seed = Field(description="Seed of the initial noise, the same for every model.")
    batch: Count = Field(description="Images in one call of the model.")
    checkpoints: Annotated[tuple[Literal["final"] | Count, ...], Different] = Field(
        ("final",),
        min_length=1,
        description=(
            "Checkpoints of every run: `final` for the last weights, "
            "or iterations in training.snapshots; reports use the first."
        ),
    )
    diversity: DiversitySettings | None = Field(
        None, description="Diversity within a prompt; null: not measured."
    )
    trained_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "Share of the steps, from the noisy end, by the trained weights; "
            "the base does the rest."
        ),
    )
    processes: Processes = Field(1, description="As training.processes.")

    @property
    def size(self) -> dict[str, int]:
        """Return height and width in pixels, by name."""
        return {"height": self.height, "width": self.width}
