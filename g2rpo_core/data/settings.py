"""Define the sections `prompts` and `embed` of a profile."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from g2rpo_core.data import FORMATS, LONGEST
from g2rpo_core.foundation.settings import Count, Seed, Settings
from g2rpo_core.hub.settings import HubPrompts
from g2rpo_core.tasks import TASK_NAMES


def _source(value: str) -> str:
    if value not in TASK_NAMES and Path(value).suffix not in FORMATS:
        raise ValueError(
            f"prompts are {' or '.join(f'`{task}`' for task in TASK_NAMES)}, "
            f"or read from {', '.join(FORMATS)}"
        )
    return value


Source = Annotated[
    Annotated[str, AfterValidator(_source), Tag("file")] | Annotated[HubPrompts, Tag("data set")],
    Discriminator(lambda value: "data set" if isinstance(value, dict | HubPrompts) else "file"),
]


class PromptSettings(Settings):
    """Sources of the training and test prompts.

    `shapes` or `words` for a tiny task's captions, a file (txt, csv, json, jsonl or parquet), or a
    data set on the hub.
    """

    train: Source = Field(description="Training prompts.")
    train_count: Count = Field(description="How many prompts are drawn, or made.")
    test: Source = Field(description="Held-out prompts.")
    test_count: Count = Field(description="How many prompts are drawn, or made.")
    test_skip: int = Field(
        0,
        ge=0,
        le=10**6,
        description=(
            "Test prompts that choices were made on: a draw of this many is left out of `test`."
        ),
    )
    seed: Seed = Field(description="Seed of the draws.")


class EmbedSettings(Settings):
    """How prompts are encoded and stored."""

    max_sequence_length: int = Field(
        ge=1, le=LONGEST, description="T5 tokens, with padding, which models attend to."
    )
    dtype: Literal["float32", "bfloat16"] = Field(description="Dtype of the stored encodings.")
    batch: Count = Field(description="Prompts in one call of the encoders.")
    shard_rows: Count = Field(description="Prompts in one Parquet file.")
    encode: Literal["stored", "online"] = Field(
        "stored",
        description=(
            "`stored`: encode training prompts once, before training; `online`: encode those of "
            "each iteration by text encoders that stay on the GPU, for sets too large to store."
        ),
    )
