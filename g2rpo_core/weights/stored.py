"""Finds the files of a transformer's weights, as diffusers does, and fills a model from them.

Every tensor is read, and no other is allowed. Names may be diffusers' or the first publisher's
(`architectures/original.py`), and may carry the wrapper of a trainer.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from g2rpo_core.architectures.architecture import Architecture, Config
from g2rpo_core.architectures.original import Rows, places
from g2rpo_core.architectures.table import read_architecture
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, in_one_line, read_json, reading, whole
from g2rpo_core.foundation.runs import check_one_kind
from g2rpo_core.hub.pretrained import OF_ANOTHER, read_header
from g2rpo_core.weights.adapter import (
    LORA_FILE,
    PEFT_FILE,
    WRAPPERS,
    Shapes,
    fill,
    fused,
    is_adapter,
    read_adapter,
    stripped,
)

# What others name their files, of which a folder has one
NAMES = (SAFETENSORS_WEIGHTS_NAME, LORA_FILE, PEFT_FILE)
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
UNREAD = dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "pickled") | {".gguf": "quantized"}


def weights_in(run: Path) -> tuple[Path, bool]:
    """Find the weights of a run, and tell whether they are a LoRA's.

    Returns the folder, index or file of a transformer, or the file of a LoRA. run: what
    `Policy.save` wrote, or a transformer or a LoRA of others, in a file or anywhere below a folder.
    UserError if there are none, or if it is not clear which are meant.
    """
    place = run
    if run.is_dir():
        check_one_kind(run)
        if (run / "transformer").exists():
            return run / "transformer", False
        if (run / "lora" / LORA_FILE).exists():
            return run / "lora" / LORA_FILE, True
        place = choose(run, [file for file in run.rglob("*") if file.is_file()])
    files = files_in(place)
    return (files[0], True) if is_adapter(read_header(files[0])[0]) else (place, False)


def choose(folder: Path, files: Sequence[Path], variant: str | None = None) -> Path:
    """Return the file that diffusers reads in and below a folder: the index if any, else weights.

    variant: what its name ends in, as `fp16`; None: a file with no such end. UserError if there is
    none, or if several could be meant.
    """
    files = _of_one_folder(folder, sorted(files))
    stems = {stem for file in files if "." not in (stem := _stem(file))} | {
        Path(name).stem for name in NAMES
    }
    of_variant = {
        file: next(
            (_stem(file)[len(stem) + 1 :] for stem in stems if _stem(file).startswith(f"{stem}.")),
            None,
        )
        for file in files
    }
    fitting = [file for file in files if of_variant[file] == variant]
    indices = [file for file in fitting if file.suffix == ".json"]
    weights = [file for file in fitting if file.suffix == ".safetensors"]
    usual = [file for file in weights if file.name in NAMES]
    for few in (
        [index for index in indices if index.name == SAFE_WEIGHTS_INDEX_NAME],
        indices,
        usual,
        weights,
    ):
        if len(few) == 1:
            return few[0]
    names = in_one_line([file.name for file in weights or files if file.suffix == ".safetensors"])
    if any(SHARD.fullmatch(file.name) for file in weights):
        raise UserError(
            complaint(
                folder, f"holds parts ({names}) without an index, which says what belongs together"
            )
        )
    if weights:
        raise UserError(
            complaint(folder, f"holds {len(weights)} files of weights ({names}): name one")
        )
    raise UserError(
        complaint(
            folder,
            f"has no weights {f'of variant {variant}' if variant else 'without a variant'}, "
            f"only {names}: name one",
        )
    )


def _stem(file: Path) -> str:
    """Return a name's stem with the variant, x.fp16 for x.fp16.safetensors.

    Also for x.safetensors.index.fp16.json.
    """
    name, _, index = file.name.partition(".safetensors")
    return name + index.removeprefix(".index").removesuffix(".json")


def _of_one_folder(run: Path, files: Sequence[Path]) -> list[Path]:
    """Return the weights among files and the indices beside them.

    UserError unless they are in one folder, or in a pipeline's.
    """
    weights = [file for file in files if file.suffix == ".safetensors"]
    homes = sorted({file.parent for file in weights})
    homes = [home for home in homes if home == run / "transformer"] or homes
    if len(homes) == 1:
        return [
            file
            for file in files
            if file.parent == homes[0] and (file in weights or ".safetensors.index." in file.name)
        ]
    if homes:
        reason = f"weights in {len(homes)} folders ({', '.join(map(str, homes[:3]))}): name one"
    elif unread := [file for file in files if file.suffix in UNREAD]:
        reason = (
            f"holds {unread[0].relative_to(run)}, which is {UNREAD[unread[0].suffix]} and so not "
            "read: take it as plain safetensors"
        )
    else:
        reason = "no safetensors; it must hold a transformer or a LoRA"
    raise UserError(complaint(run, reason))


def files_in(place: Path) -> tuple[Path, ...]:
    """Return the files of weights: of a folder, of an index, or the file itself.

    Errors as in `choose`.
    """
    if place.is_dir():
        place = choose(place, list(place.glob("*")))
    if place.suffix != ".json":
        return (place,)
    parts = set(read_json(whole(place), dict).get("weight_map", {}).values())
    if not parts or not all(isinstance(part, str) and Path(part).name == part for part in parts):
        raise UserError(complaint(place, "names no files beside it"))
    if gone := sorted(part for part in parts if not (place.parent / part).exists()):
        # The index may be of an older save
        files = {file.name for file in place.parent.glob("*.safetensors")} - parts
        others = in_one_line(sorted(name for name in files if not SHARD.fullmatch(name)))
        reason = f"does not exist, and {place.name} names it" + (
            f": to read {others}, delete the index" if others else ""
        )
        raise UserError(complaint(place.parent / gone[0], reason))
    return tuple(place.parent / part for part in sorted(parts))


def check_fits(pipeline: Path, run: Path) -> None:
    """Check names and shapes of a run's weights against a base model; UserError if they differ.

    pipeline: the base model's folder. Of whole weights only headers are read. Weights with a
    configuration beside them are of the model that it describes.
    """
    base, (place, lora) = read_architecture(pipeline), weights_in(run)
    own = (place if place.is_dir() else place.parent) / "config.json"
    config = pipeline / "transformer" / "config.json" if lora or not own.exists() else own
    with reading(whole(config)):
        settings = base.transformer.load_config(config.parent)
    shapes = shapes_of(base, settings)
    if lora:
        read_adapter(base, settings, shapes, place)
    else:
        _match(base, settings, shapes, files_in(place))


def shapes_of(architecture: Architecture, config: Config) -> dict[str, torch.Size]:
    """Return the shape of every weight of a transformer of this configuration."""
    with torch.device("meta"):
        return {
            name: value.shape
            for name, value in architecture.transformer.from_config(config).state_dict().items()
        }


def read_weights(architecture: Architecture, transformer: torch.nn.Module, place: Path) -> None:
    """Fill all but an adapter's weights from a folder or file.

    Each process reads only its own slices, but stacked modules whole.
    """
    files = files_in(place)
    state = {
        name.replace(".base_layer.", "."): value
        for name, value in transformer.state_dict().items()
        if ".lora_" not in name
    }
    where = _match(
        architecture,
        transformer.config,
        {name: value.shape for name, value in state.items()},
        files,
    )
    if all(rows.count is None and not rows.shift_first for _, rows in where.values()):
        reader = HuggingFaceStorageReader(str(files[0].parent))
        # Not every file of the folder
        reader.fs.ls = lambda _: list(map(str, files))  # type: ignore[method-assign]
        with reading(files[0]):  # each process reads for itself
            dcp.load(
                {rows.name: state[name] for name, (_, rows) in where.items()},
                storage_reader=reader,
                no_dist=True,
            )
        return
    for file in files:
        with reading(file), safe_open(file, "pt") as opened, torch.no_grad():
            for name, (holder, rows) in where.items():
                if holder == file:
                    fill(state[name], rows.of(opened.get_slice(rows.name)))


def _match(
    architecture: Architecture, config: Config, shapes: Shapes, files: Sequence[Path]
) -> dict[str, tuple[Path, Rows]]:
    """Return the file and name of each weight; UserError unless the files hold exactly these."""
    # Names and shapes in the headers
    stored: dict[str, tuple[Path, str, list[int]]] = {}
    for file in files:
        for name, (_, shape) in read_header(file, floating="")[0].items():
            known = name if name in shapes else stripped(WRAPPERS.sub("", name))
            if known in stored:
                raise UserError(
                    complaint(
                        file,
                        f"{name} stands in {stored[known][0].name}, too: omit one of them",
                        hint="",
                    )
                )
            stored[known] = (file, name, shape)
    for name in architecture.unused:
        stored.pop(name, None)
    # Under diffusers' names, or under the original ones
    layouts: list[Mapping[str, Rows]] = [
        {name: Rows(name) for name in shapes},
        places(shapes, architecture.original_modules(config)),
    ]
    differences = [{rows.name for rows in layout.values()} ^ stored.keys() for layout in layouts]
    layout, wrong = min(zip(layouts, differences), key=lambda pair: len(pair[1]))
    if wrong:
        first = min(wrong)
        which = "has the unknown weight" if first in stored else "lacks"
        reason = fused(wrong) or (f"{which} {first} ({len(wrong)} such differences): {OF_ANOTHER}")
        raise UserError(complaint(files[0] if len(files) == 1 else files[0].parent, reason))
    # Each of the model's shape; those that one tensor holds, all of it
    rows_of: dict[str, int] = {}
    for name, rows in layout.items():
        file, _, shape = stored[rows.name]
        rows_of[rows.name] = rows_of.get(rows.name, 0) + (shapes[name][0] if shapes[name] else 1)
        if (
            shape[1:] != list(shapes[name][1:])
            or rows.count is None
            and shape != list(shapes[name])
        ):
            raise UserError(
                complaint(
                    file, f"{rows.name} is {shape}, the model's {name} is {list(shapes[name])}"
                )
            )
    for name, count in rows_of.items():
        file, _, shape = stored[name]
        if shape and shape[0] != count:
            raise UserError(complaint(file, f"{name} has {shape[0]} rows, the model's {count}"))
    under = lambda rows: Rows(stored[rows.name][1], rows.start, rows.count, rows.shift_first)
    return {name: (stored[rows.name][0], under(rows)) for name, rows in layout.items()}
