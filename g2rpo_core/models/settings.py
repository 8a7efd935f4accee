"""The parts of section `training` about the model: its LoRA, and how it is spread over GPUs."""

from typing import Annotated, Literal

from pydantic import Field

from g2rpo_core.foundation.settings import Count, Different, Scale, Settings


class LoraSettings(Settings):
    """A low-rank adapter (LoRA, arXiv 2106.09685) of the transformer: rank, scale alpha / rank, and the layers that get one."""

    rank: int = Field(gt=0, le=2**16, description="of the adapter")
    alpha: Scale = Field(description="the adapter is scaled by alpha / rank")
    target_modules: Annotated[tuple[str, ...], Different, Field(min_length=1)] | None = Field(
        None,
        description=(
            "ends of module names; null: the attention projections, "
            "as the base model's published recipe has them"
        ),
    )


class ParallelSettings(Settings):
    """How a model that is too large or too slow for one GPU is trained."""

    compile: bool = Field(False, description="compile every block")
    shard_size: Count | None = Field(
        None,
        description=(
            "processes that share one copy of the weights; null, or more than there are: "
            "all of them"
        ),
    )
    replica: bool = Field(
        False,
        description="a whole copy of the weights for rollouts, in the dtype of the computation",
    )
    reduce: Literal["update", "call"] = Field(
        "update",
        description=(
            "sum gradients over the processes once per update, with unsharded float32 gradients on "
            "every GPU until then, or in every call"
        ),
    )
