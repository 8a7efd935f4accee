"""Converts pickled checkpoints (.pt, .bin) to safetensors, once, without running any code in them."""

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from g2rpo_core.errors import UserError

PICKLED = (".pt", ".pth", ".bin")
NESTED = ("state_dict", "model")  # keys under which published checkpoints keep their weights


def without_pickles(folder: Path, target: Path) -> Path:
    """Returns `target`, a folder with every file of `folder`, but pickled checkpoints as safetensors; made if it does not exist.

    UserError names a checkpoint that holds anything but tensors by name.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            new = made / path.relative_to(folder)
            new.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in PICKLED:
                save_file(read_pickled(path), new.with_suffix(".safetensors"))
            else:
                new.symlink_to(path.resolve())
        os.rename(made, target)
    return target


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a pickled checkpoint, each in its own memory; UserError if it is damaged or holds more than weights."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it ends too early"
        raise UserError(
            f"{path}: is damaged or holds more than weights, so it is not read ({reason}): delete it and run again"
        ) from None
    for key in NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not loaded:
        raise UserError(f"{path}: holds no named weights")
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: {name} is not a tensor but a {type(tensor).__name__}")
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in loaded.items()}
