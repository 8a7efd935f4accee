"""Stage `embed`: encodes the prompts with the pipeline's text encoders into sharded Parquet."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from g2rpo_core.architectures.table import read_architecture, text_encoders
from g2rpo_core.data.embeddings import (
    DTYPES,
    check_lengths,
    encode,
    encode_negative,
    note_short_encoders,
    without_long,
    write,
    write_negative,
    write_online,
)
from g2rpo_core.data.prompts import Prompt, load_prompts, of_data_set
from g2rpo_core.distributed.checkpoint import check_room, claim, discard, publish, scratch
from g2rpo_core.distributed.device import check_device
from g2rpo_core.foundation.progress import Bar
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub import made
from g2rpo_core.hub.model_store import LOCK, ModelStore
from g2rpo_core.numerics.portable import in_use
from g2rpo_core.numerics.processes import device_of
from stages.entry import arguments, ends_in_one_line, sections
from stages.paths import model_folders, run_paths
from stages.versions import code_of

SECTIONS = ("numerics", "embed")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    settings = sections(args, *SECTIONS).embed
    (models, embeddings), home = model_folders(args), run_paths(args.profile, args.study).name
    check_device(ModelStore(models))
    claim("embed", home)

    # Read prompts and text encoders, and check that every prompt fits
    files = {name: Path("prompts", args.profile, f"{name}.parquet") for name in ("train", "test")}
    sets: dict[str, Sequence[Prompt]] = {name: load_prompts(file) for name, file in files.items()}
    inputs, code = [models / LOCK, *files.values()], code_of("embed")
    if made.reuse(key := made.key_of(settings, inputs, in_use(), str(code)), embeddings):
        return
    folder = ModelStore(models).folder("pipeline")
    base = read_architecture(folder)
    pipeline = text_encoders(folder, dtype=DTYPES[settings.dtype])
    pipeline.to(device_of(None))
    limit = settings.max_sequence_length
    sets = _fitting(sets, files, base.tokenizer(pipeline), limit)
    note_short_encoders([prompt for prompts in sets.values() for prompt in prompts], pipeline)
    config = base.transformer.load_config(folder / "transformer")
    # Find what an interrupted run has written, and check the room for the rest
    shapes = base.encoding_shapes(config, limit, pipeline.tokenizer.model_max_length)
    folder = scratch("embed", home, {"embed": settings, **code}, inputs)
    width = sum(math.prod(shape) for shape in shapes.values())
    written = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
    online = ["train"] if settings.encode == "online" else []
    stored = sum(len(prompts) for name, prompts in sets.items() if name not in online)
    needed = width * DTYPES[settings.dtype].itemsize * stored - written
    check_room(needed, "encoding the prompts")
    # Encode, and write the outputs
    encoded = partial(encode, pipeline, max_length=limit, batch=settings.batch)
    negative = encode_negative(pipeline, limit)
    for name, prompts in sets.items():
        out = folder / "out" / name
        if name in online:
            write_online(out, prompts, settings.dtype, limit)
        else:
            with Bar(desc=f"embed {name}", total=len(prompts), unit="prompt") as bar:
                how = (settings.dtype, settings.shard_rows, bar.update)
                write(out, prompts, encoded, *how, folder / "manifests" / name)
        write_negative(out, negative, settings.dtype)
    publish(folder / "out", embeddings)
    made.note(key, embeddings)
    discard(folder)


def _fitting(
    sets: Mapping[str, Sequence[Prompt]], files: Mapping[str, Path], tokenizer, limit: int
) -> dict[str, Sequence[Prompt]]:
    """Return the prompts that fit: all of a file must, of a data set the others are left out."""
    fitting = {}
    for name, prompts in sets.items():
        if not of_data_set(files[name]):
            check_lengths(prompts, tokenizer, limit)
            fitting[name] = prompts
            continue
        fitting[name] = without_long(prompts, tokenizer, limit)
        if count := len(prompts) - len(fitting[name]):
            echo(
                f"{count} of {len(prompts)} {name} prompts were left out: "
                f"over embed.max_sequence_length = {limit}"
            )
    return fitting


if __name__ == "__main__":
    main()
