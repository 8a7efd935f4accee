"""Stage `embed`: encodes the prompts by the pipeline's text encoders into sharded Parquet."""

from pathlib import Path

import torch
from diffusers import FluxPipeline
from tqdm import tqdm

from g2rpo_core.embeddings import DTYPES, check_lengths, encode, write
from g2rpo_core.model_store import ModelStore
from g2rpo_core.prompts import load_prompts
from stages.common import arguments, fresh, sections, stage

SECTIONS = ("embed",)


@stage
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args.profile, *SECTIONS).embed
    sets = {name: load_prompts(Path("prompts", args.profile, f"{name}.parquet")) for name in ("train", "test")}
    folder = ModelStore(Path("models", args.profile)).folder("pipeline")
    pipeline = FluxPipeline.from_pretrained(folder, transformer=None, vae=None, dtype=DTYPES[settings.dtype])
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    for prompts in sets.values():
        check_lengths(prompts, pipeline.tokenizer_2, settings.max_sequence_length)
    for name, prompts in sets.items():
        encoded = encode(pipeline, prompts, settings.max_sequence_length, settings.batch)
        bar = tqdm(encoded, desc=f"embed {name}", total=len(prompts), unit="prompt", mininterval=2)
        write(fresh(Path("embeddings", args.profile, name)), bar, settings.dtype, settings.shard_rows)


if __name__ == "__main__":
    main()
