"""Loads a model from a folder, and asks what the libraries left out, which they only log."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import complaint, in_one_line, read_json, reading, whole
from g2rpo_core.hub.pickled import read_pickled

# Named in files, and used by no model here: an index that older versions saved, and the word head
# of an encoder
UNUSED = ("relative_position_index", "lm_head.weight")
# Ends of the names of whole numbers in models and LoRAs: places, what was counted, factors
WHOLE = ("_ids", "_index", "_tracked", "alpha")
TOKENIZER = "tokenizer.json"  # a whole tokenizer


def refuse_quantized(config: Path, what: str) -> None:
    """Raise a UserError if a model's config says that its weights are quantized.

    They ask for packages that are not in the lock, such as bitsandbytes.
    """
    if (attempt(lambda: read_json(config, dict))[0] or {}).get("quantization_config"):
        raise UserError(f"{what}: its weights are quantized: name those that are not")


def refuse_integers(files: Iterable[Path]) -> None:
    """Raise a UserError for the first weight that is stored as integers, or as truth values."""
    for file in files:
        read_weights(file)


def only_file(folder: Path, name: str) -> Path:
    """Return the one file of weights of this name, .pt or .safetensors; UserError without it."""
    found = [*folder.glob(f"{name}.*")]
    if len(found) != 1:
        raise UserError(
            complaint(folder, f"has {len(found)} files {name}.pt or .safetensors; need one")
        )
    return found[0]


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read weights onto the CPU, those of safetensors when they are used.

    UserError for numbers that are not floating-point:
    names and shapes can be a model's own, but they are codes of another one's weights.
    """
    with reading(whole(file)):
        weights = load_file(file) if file.suffix == ".safetensors" else read_pickled(file)
        for name, value in weights.items():
            if not value.is_floating_point() and not name.endswith(WHOLE):
                raise UserError(
                    f"{file}: {name} is {str(value.dtype).removeprefix('torch.')}, and weights are "
                    "floating-point numbers: take those before quantization"
                )
    return weights


def renamed(
    weights: Mapping[str, torch.Tensor],
    patterns: Sequence[tuple[str, str]],
    unused: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Return weights under names of transformers, by all patterns in turn, without those unused."""
    named = {}
    for name, value in weights.items():
        if not name.startswith(unused):
            for pattern, replacement in patterns:
                name = re.sub(pattern, replacement, name)
            named[name] = value
    return named


def with_vocabulary(loaded: Any, folder: Path) -> Any:
    """Return a tokenizer, or what has one; UserError if its vocabulary is not in the folder.

    transformers (5.23.0) makes up one of a few special words then, and every prompt is unknown.
    """
    files = getattr(loaded, "tokenizer", loaded).vocab_files_names.values()
    ways = [[TOKENIZER], [name for name in files if name != TOKENIZER] or [TOKENIZER]]
    if not any(all((folder / name).exists() for name in names) for names in ways):
        raise UserError(complaint(folder, f"lacks {', or '.join(map(in_one_line, ways))}"))
    return loaded


def load_whole(kind: Any, folder: Path, **options: object) -> Any:
    """Return `kind.from_pretrained(folder)`; UserError unless the weights are exactly the model's.

    The model is that which the folder's config describes. kind: a model class of transformers or
    diffusers, or an AutoModel of transformers.
    """
    refuse_quantized(folder / "config.json", str(folder))
    # Without those of a variant, which are not read
    files = (*folder.glob("*.safetensors"), *folder.glob("*pytorch_model*.bin"))
    refuse_integers(file for file in files if "." not in file.stem)
    with reading(folder):
        model, info = kind.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    missing = sorted(info["missing_keys"])
    mismatched = sorted(name for name, *_ in info["mismatched_keys"])
    unknown = sorted(name for name in info["unexpected_keys"] if not name.endswith(UNUSED))
    for which, names in (
        ("lacks", missing),
        ("has another shape of", mismatched),
        ("has the unknown", unknown),
    ):
        if names:
            reason = (
                f"{which} {in_one_line(names)}: its weights belong to another model, "
                "or are incomplete"
            )
            raise UserError(complaint(folder, reason))
    return model
