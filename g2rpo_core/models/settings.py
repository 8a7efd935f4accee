"""The parts of section `training` about the model: its LoRA, and how it is spread over GPUs."""

from typing import Annotated, Literal

from pydantic import Field

from g2rpo_core.foundation.settings import Count, Different, Scale, Settings


class LoraSettings(Settings):
    """A low-rank adapter (LoRA, arXiv 2106.09685) of the transformer."""

    rank: int = Field(gt=0, le=2**16, description="Rank of the adapter.")
    alpha: Scale = Field(description="The adapter is scaled by alpha / rank.")
    target_modules: Annotated[tuple[str, ...], Different, Field(min_length=1)] | None = Field(
        None,
        description=(
            "Ends of module names; null: the attention projections, "
            "as in the base model's published recipe."
        ),
    )


class ParallelSettings(Settings):
    """How a model that is too large or too slow for one GPU is trained."""

    compile: bool = Field(
        False, description="Compile every block: up to seven graphs a kind, once a run."
    )
    shard_size: Count | None = Field(
        None,
        description=(
            "Processes that share one copy of the weights; "
            "null, or more than there are: all of them."
        ),
    )
    replica: bool = Field(
        False,
        description="Keep a whole copy of the weights for rollouts, in the computation's dtype.",
    )
    reduce: Literal["update", "call"] = Field(
        "update",
        description=(
            "`update`: sum gradients over the processes once per update, with unsharded float32 "
            "gradients on every GPU until then; `call`: sum them in every call."
        ),
    )
