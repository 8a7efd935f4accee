"""The sections `prompts` and `embed` of a profile."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from g2rpo_core.settings import Count, Seed, Settings

LONGEST = 512  # tokens that FLUX's text encoder was trained with
FORMATS = (".txt", ".csv", ".jsonl", ".parquet")


def _source(value: str) -> str:
    if value != "shapes" and Path(value).suffix not in FORMATS:
        raise ValueError(f"prompts are `shapes`, or read from {', '.join(FORMATS)}")
    return value


Source = Annotated[str, AfterValidator(_source)]


class PromptSettings(Settings):
    """Where prompts come from; `shapes` or a file of txt, csv, jsonl or parquet, for each of the two sets."""

    train: Source
    train_count: Count
    test: Source
    test_count: Count
    seed: Seed


class EmbedSettings(Settings):
    """How prompts are encoded and stored."""

    max_sequence_length: int = Field(ge=1, le=LONGEST, description="T5 tokens, padding included: FLUX attends to it")
    dtype: Literal["float32", "bfloat16"]
    batch: Count
    shard_rows: Count
