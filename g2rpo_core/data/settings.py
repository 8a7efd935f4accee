"""The sections `prompts` and `embed` of a profile."""

from typing import Literal

from pydantic import Field, PositiveInt

from g2rpo_core.settings import Settings


class PromptSettings(Settings):
    """Where prompts come from; `shapes` or a file of txt, csv, jsonl or parquet, for each of the two sets."""

    train: str
    train_count: PositiveInt
    test: str
    test_count: PositiveInt
    seed: int


class EmbedSettings(Settings):
    """How prompts are encoded and stored."""

    max_sequence_length: int = Field(ge=1, le=512, description="T5 tokens, padding included: FLUX attends to it")
    dtype: Literal["float32", "bfloat16"]
    batch: PositiveInt
    shard_rows: PositiveInt
