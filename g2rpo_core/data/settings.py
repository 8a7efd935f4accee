"""The sections `prompts` and `embed` of a profile."""

from typing import Literal

from pydantic import Field

from g2rpo_core.settings import Count, Seed, Settings


class PromptSettings(Settings):
    """Where prompts come from; `shapes` or a file of txt, csv, jsonl or parquet, for each of the two sets."""

    train: str
    train_count: Count
    test: str
    test_count: Count
    seed: Seed


class EmbedSettings(Settings):
    """How prompts are encoded and stored."""

    max_sequence_length: int = Field(ge=1, le=512, description="T5 tokens, padding included: FLUX attends to it")
    dtype: Literal["float32", "bfloat16"]
    batch: Count
    shard_rows: Count
