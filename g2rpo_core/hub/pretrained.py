"""Loads a model from a folder, and asks what the libraries left out, which they only log."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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
FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
OF_ANOTHER = "its weights belong to another model, or are incomplete"
BEFORE = "take those before quantization"
OF_CODES = f"and weights are floating-point numbers: {BEFORE}"
UNREAD = {  # the first bytes of files that are no safetensors -> what they are
    b"GGUF": f"its weights are quantized (GGUF): {BEFORE}",
    b"PK\x03\x04": "is pickled and so not read: save it as safetensors",
}
QUANTIZED = {  # in the name of a tensor, or of an entry of the header -> what quantized them
    r"\.(absmax|nested_absmax|quant_map|SCB)$|\.quant_state\.": "bitsandbytes",
    r"_qdata$|\.tensor_impl": "torchao",
    r"\._(data|scale|shift)$": "optimum-quanto",
    r"\.w(scales|zeros|tscale|cscales)$": "nunchaku",
    r"\.(qweight|qzeros|g_idx)$": "GPTQ or AWQ",
    r"\.W_q$": "HQQ",
    r"\.scale_(weight|input)$|scaled_fp8$|\.comfy_quant$|^_quantization_metadata$": "ComfyUI",
    r"\.weight_(scale|packed|zero_point)|\.(input|output)_scale$|_quantizer\.": "scales beside",
    r"^quantization_config$": "its header",
}


def refuse_quantized(config: Path, what: str) -> None:
    """Raise a UserError if a model's config says that its weights are quantized.

    They ask for packages that are not in the lock, such as bitsandbytes.
    """
    if (attempt(lambda: read_json(config, dict))[0] or {}).get("quantization_config"):
        raise UserError(f"{what}: its weights are quantized: name those that are not")


def read_header(
    file: Path, floating: str | tuple[str, ...] = ("weight", "bias")
) -> tuple[dict[str, tuple[str, list[int]]], dict[str, str]]:
    """Return the dtype and shape of each tensor in safetensors by its name, and the metadata.

    UserError for weights that were quantized, by the names beside them or by their dtype: names and
    shapes can be a model's own, but the numbers are codes of another one's. floating: ends of the
    names that are weights; alphas are none.
    """
    with reading(whole(file)), file.open("rb") as opened:
        if other := UNREAD.get(opened.read(4)):
            raise UserError(f"{file}: {other}")
    with reading(file), safe_open(file, "pt") as opened:
        tensors = {
            name: (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape())
            for name in opened.keys()  # noqa: SIM118 - not iterable itself
        }
        metadata = opened.metadata() or {}
    for part, by in QUANTIZED.items():
        if name := next(filter(re.compile(part).search, (*tensors, *metadata)), None):
            raise UserError(f"{file}: its weights are quantized ({by}: {name}): {BEFORE}")
    if any(".base_layer." in name for name in tensors):
        raise UserError(
            f"{file}: is a model saved with its adapter attached: save the adapter alone "
            "(`save_lora_adapter`), or merge and unload it first (`fuse_lora`, `unload_lora`)"
        )
    for name, (dtype, _) in tensors.items():
        if name.endswith(floating) and not (dtype in FLOATING or name.endswith("alpha")):
            raise UserError(
                f"{file}: {name} is {dtype.replace('U', 'uint').replace('I', 'int').lower()}, "
                f"{OF_CODES}"
            )
    return tensors, metadata


def only_file(folder: Path, name: str) -> Path:
    """Return the one file of weights of this name, .pt or .safetensors; UserError without it."""
    found = [*folder.glob(f"{name}.*")]
    if len(found) != 1:
        raise UserError(
            complaint(folder, f"has {len(found)} files {name}.pt or .safetensors; need one")
        )
    return found[0]


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read weights onto the CPU, safetensors when they are used; errors as in `read_header`."""
    if file.suffix == ".safetensors":
        read_header(file)
        return load_file(file)
    with reading(whole(file)):
        weights = read_pickled(file)
    for name, value in weights.items():
        if not value.is_floating_point() and not name.endswith(WHOLE):
            raise UserError(
                f"{file}: {name} is {str(value.dtype).removeprefix('torch.')}, {OF_CODES}"
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
    for file in (*folder.glob("*.safetensors"), *folder.glob("*pytorch_model*.bin")):
        if "." not in file.stem:
            (read_header if file.suffix == ".safetensors" else read_weights)(file)
    with reading(folder):
        model, info = kind.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    for which, names in (
        ("lacks", info["missing_keys"]),
        ("has another shape of", [name for name, *_ in info["mismatched_keys"]]),
        (
            "has the unknown",
            [name for name in info["unexpected_keys"] if not name.endswith(UNUSED)],
        ),
    ):
        if names:
            raise UserError(
                complaint(folder, f"{which} {in_one_line(sorted(names))}: {OF_ANOTHER}")
            )
    return model
