"""The sections `prompts` and `embed` of a profile."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveInt, Tag

from g2rpo_core.hub.settings import HubPrompts
from g2rpo_core.settings import Settings

Source = Annotated[
    Annotated[str, Tag("file")] | Annotated[HubPrompts, Tag("data set")],
    Discriminator(lambda value: "data set" if isinstance(value, dict | HubPrompts) else "file"),
]


class PromptSettings(Settings):
    """Where prompts come from: `shapes`, a file of txt, csv, json, jsonl or parquet, or a data set of the hub, for each of the two sets."""

    train: Source
    train_count: PositiveInt
    test: Source
    test_count: PositiveInt
    seed: int


class EmbedSettings(Settings):
    """How prompts are encoded and stored."""

    max_sequence_length: int = Field(ge=1, le=512, description="T5 tokens, padding included: FLUX attends to it")
    dtype: Literal["float32", "bfloat16"]
    batch: PositiveInt
    shard_rows: PositiveInt
