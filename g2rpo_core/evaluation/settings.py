"""The section `evaluation` of a profile."""

from typing import Annotated, Literal

from pydantic import Field

from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.foundation.settings import Count, Different, Pixels, Seed, Settings


class DiversitySettings(Settings):
    """How the diversity within a prompt is measured: on how many of the first prompts, with how many noises each."""

    prompts: Count = Field(description="how many of the first test prompts")
    noises: int = Field(ge=2, le=1000, description="images of each of them")


class EvaluationSettings(Settings):
    """Which images of the test prompts are made, and by which rewards they are scored."""

    how = frozenset({"processes"})

    steps: Annotated[tuple[Annotated[int, Field(gt=0, le=1000)], ...], Different] = Field(
        min_length=1, description="numbers of steps; reports use the first"
    )
    height: Pixels = Field(description="of images, in pixels")
    width: Pixels = Field(description="of images, in pixels")
    rewards: Annotated[tuple[str, ...], Different] = Field(
        min_length=1, description="that score the images, in the report's order"
    )
    seed: Seed = Field(description="of the initial noise, the same for every model")
    batch: Count = Field(description="images in one call of the model")
    checkpoints: Annotated[tuple[Literal["final"] | Count, ...], Different] = Field(
        ("final",),
        min_length=1,
        description=(
            "of every run: the last weights, or iterations in training.snapshots; "
            "reports use the first"
        ),
    )
    diversity: DiversitySettings | None = Field(None, description="null: not measured")
    trained_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "share of the steps, from the noisy end, by the trained weights; the base does the rest"
        ),
    )
    processes: Processes = Field(1, description="as training.processes")

    @property
    def size(self) -> dict[str, int]:
        """Return height and width in pixels, by name."""
        return {"height": self.height, "width": self.width}
