"""Stage `embed`: encodes the prompts with the pipeline's text encoders into sharded Parquet."""

from functools import partial
from pathlib import Path

import torch
from diffusers import FluxPipeline
from tqdm import tqdm

from g2rpo_core.common.model_store import AGAIN, LOCK, ModelStore
from g2rpo_core.data.embeddings import DTYPES, check_lengths, encode, write
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.distributed import checkpoint
from g2rpo_core.files import reading
from stages.common import arguments, declared_code, ends_in_one_line, sections

SECTIONS = ("embed",)


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).embed
    checkpoint.claim("embed", args.profile)
    files = {name: Path("prompts", args.profile, f"{name}.parquet") for name in ("train", "test")}
    sets = {name: load_prompts(file) for name, file in files.items()}
    models = Path("models", args.profile)
    folder = ModelStore(models).folder("pipeline")
    with reading(folder, AGAIN):
        pipeline = FluxPipeline.from_pretrained(folder, transformer=None, vae=None, dtype=DTYPES[settings.dtype])
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    for prompts in sets.values():
        check_lengths(prompts, pipeline.tokenizer_2, settings.max_sequence_length)
    folder = checkpoint.scratch(
        "embed", args.profile, {"embed": settings}, [*declared_code("embed"), models / LOCK, *files.values()]
    )
    width = settings.max_sequence_length * pipeline.text_encoder_2.config.d_model + pipeline.text_encoder.config.hidden_size
    written = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
    needed = width * DTYPES[settings.dtype].itemsize * sum(map(len, sets.values())) - written
    checkpoint.check_room(needed, "encoding the prompts")
    encoded = partial(encode, pipeline, max_length=settings.max_sequence_length, batch=settings.batch)
    for name, prompts in sets.items():
        with tqdm(desc=f"embed {name}", total=len(prompts), unit="prompt", mininterval=2) as bar:
            write(folder / "out" / name, prompts, encoded, settings.dtype, settings.shard_rows, bar.update)
    checkpoint.publish(folder / "out", Path("embeddings", args.profile))
    checkpoint.discard(folder)


if __name__ == "__main__":
    main()
