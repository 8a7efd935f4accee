"""Turns pickled checkpoints into safetensors; they may hold tensors by name and nothing else."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath

import torch
from safetensors.torch import save_file

from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import read_json, reading
from g2rpo_core.foundation.manifest import damages, describe_files
from g2rpo_core.foundation.permissions import share_weights
from g2rpo_core.hub.model_store import HASHED, LOCK, write_lock

PICKLED = (".pt", ".pth", ".bin")
NESTED = ("state_dict", "model")  # keys under which published checkpoints keep their weights


def has_weights_alone(file: str, files: Iterable[str]) -> bool:
    """Tell whether a pickled file is the only one of weights in its folder, of these files.

    Beside safetensors, it holds a trainer's arguments, or copies.
    """
    beside = (path for path in map(PurePath, files) if path.parent == PurePath(file).parent)
    return file.endswith(PICKLED) and all(path.suffix != ".safetensors" for path in beside)


def convert_pickles(
    folder: Path, target: Path, files: Sequence[str], variant: str | None = None
) -> Path:
    """Return `target`, a folder with these files of `folder`, pickled checkpoints as safetensors.

    One that is as it was made stays. Pickled ones beside safetensors are left out. variant: of the
    files that have it in their names, in each folder within; they get the names of those without,
    which are left out. In it, LOCK has the size and hash of each, for `ModelStore.folder`.
    UserError names a checkpoint that holds anything but tensors by name.
    """
    if attempt(lambda: damages(target, read_json(target / LOCK, dict), HASHED))[0] == []:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        for file in files:
            path, new = folder / file, made / file
            new.parent.mkdir(parents=True, exist_ok=True)
            if has_weights_alone(file, files):
                with reading(path):  # tensors of kinds that safetensors has not
                    save_file(read_pickled(path), new.with_suffix(".safetensors"))
            elif path.suffix not in PICKLED and (plain := _without_variant(file, files, variant)):
                # Not to what this is a link to: the hub's client moves that
                new.with_name(plain).symlink_to(path.absolute())
        share_weights(made)
        write_lock(made, describe_files(made))
        try:
            os.rename(made, target)
        except OSError:  # another process was first
            if not (target / LOCK).exists():
                raise
    return target


def _without_variant(file: str, files: Sequence[str], variant: str | None) -> str | None:
    """Return a file's name without its variant; None for one that the variant's file replaces.

    files: all that there are. Parts keep their names, which the index says.
    """
    path = PurePath(file)
    if variant is None or re.search(r"-\d{5}-of-\d{5}\.", path.name):
        return path.name
    if f".{variant}." in path.name:
        return path.name.replace(f".{variant}.", ".")
    beside = {
        other.name.replace(f".{variant}.", ".")
        for other in map(PurePath, files)
        if other.parent == path.parent and f".{variant}." in other.name
    }
    return (
        None
        if path.name in beside or beside and path.name.endswith(".safetensors.index.json")
        else path.name
    )


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a pickled checkpoint, each in its own memory.

    UserError if it is damaged or holds more than weights.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # it raises almost anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it ends too early"
        raise UserError(
            f"{path}: is damaged or holds more than weights, so it is not read ({reason}): "
            "name other files, safetensors if there are any"
        ) from error
    for key in NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not loaded:
        raise UserError(f"{path}: holds no named weights")
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: {name} is not a tensor but a {type(tensor).__name__}")
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in loaded.items()
    }
