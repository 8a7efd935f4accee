"""Loads a model from a folder, and asks what the libraries left out, which they only log."""

from pathlib import Path
from typing import Any

from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import complaint, in_one_line, read_json, reading

# Named in files, and used by no model here: an index that older versions saved, and the word head
# of an encoder
UNUSED = ("relative_position_index", "lm_head.weight")


def refuse_quantized(config: Path, what: str) -> None:
    """Raise a UserError if a model's config says that its weights are quantized.

    They ask for packages that are not in the lock, such as bitsandbytes.
    """
    if (attempt(lambda: read_json(config, dict))[0] or {}).get("quantization_config"):
        raise UserError(f"{what}: its weights are quantized: name those that are not")


def load_whole(kind: Any, folder: Path, **options: object) -> Any:
    """Return `kind.from_pretrained(folder)`; UserError unless the weights are exactly the model's.

    The model is that which the folder's config describes. kind: a model class of transformers or
    diffusers, or an AutoModel of transformers.
    """
    refuse_quantized(folder / "config.json", str(folder))
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
