"""Loads a model from a folder, and asks what the libraries left out, which they only log."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import complaint, in_one_line, read_json, reading, whole

# Named in files, and used by no model here: an index that older versions saved, and the word head
# of an encoder
UNUSED = ("relative_position_index", "lm_head.weight")


def refuse_quantized(config: Path, what: str) -> None:
    """Raise a UserError if a model's config says that its weights are quantized.

    They ask for packages that are not in the lock, such as bitsandbytes.
    """
    if (attempt(lambda: read_json(config, dict))[0] or {}).get("quantization_config"):
        raise UserError(f"{what}: its weights are quantized: name those that are not")


def refuse_integers(files: Iterable[Path]) -> None:
    """Raise a UserError for a weight or bias that is stored as integers, or as truth values.

    Names and shapes can be a model's own, but the numbers are codes of another one's.
    """
    for file in files:
        with reading(whole(file)), safe_open(file, "pt") as opened:
            dtypes = {
                name: opened.get_slice(name).get_dtype()
                for name in opened.keys()  # noqa: SIM118 - not iterable itself
            }
        for name, dtype in dtypes.items():
            if name.endswith(("weight", "bias")) and not dtype.startswith(("F", "BF")):
                raise UserError(
                    f"{file}: {name} is {dtype.replace('U', 'uint').replace('I', 'int').lower()}, "
                    "and weights are floating-point numbers: take those before quantization"
                )


def load_whole(kind: Any, folder: Path, **options: object) -> Any:
    """Return `kind.from_pretrained(folder)`; UserError unless the weights are exactly the model's.

    The model is that which the folder's config describes. kind: a model class of transformers or
    diffusers, or an AutoModel of transformers.
    """
    refuse_quantized(folder / "config.json", str(folder))
    # Without those of a variant, which are not read
    refuse_integers(file for file in folder.glob("*.safetensors") if "." not in file.stem)
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
