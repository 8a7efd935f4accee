"""Reads a transformer so that no process ever holds more than its part: built without data, sharded, and filled from the files.

Every process reads only its own slices of the safetensors, and casts them as it copies. A single process works the same way.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, distribute_tensor

from g2rpo_core.bases.base import Base
from g2rpo_core.errors import UserError
from g2rpo_core.files import complaint, reading, whole
from g2rpo_core.models.settings import LoraSettings

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name
Spread = Callable[[ModelMixin], None]


def load_transformer(
    base: Base,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    trained: bool,
    lora: LoraConfig | None = None,
    spread: Spread | None = None,
    config: Path | None = None,
    again: str = "",
) -> ModelMixin:
    """The transformer of a diffusers folder on `device`.

    dtype: of its parameters; trained: whether they have gradients; lora: an adapter to add, in float32: then only it has
    gradients, and `draw_lora` sets its values; spread: compiles and shards the model while it has no data; config: the folder
    with the model's configuration, if it is another one; again: how to make the folder again. UserError if the files do not hold
    exactly the model's weights.
    """
    transformer = empty_transformer(base, config or folder, dtype, trained, lora, again)
    if spread:
        spread(transformer)
    allocate(transformer, device)
    read_weights(transformer, folder, again)
    return transformer


def empty_transformer(
    base: Base, folder: Path, dtype: torch.dtype, trained: bool, lora: LoraConfig | None = None, again: str = ""
) -> ModelMixin:
    """A transformer on the meta device, without data.

    ValueError for a class with buffers that no file holds: they would lack values.
    """
    config = whole(folder / "config.json", again)
    with torch.device("meta"), reading(config, again):
        transformer = base.transformer.from_config(base.transformer.load_config(folder))
        transformer.register_to_config(_name_or_path=str(folder))  # as from_pretrained does, for readers of the saved model
        transformer.requires_grad_(trained and lora is None)
        if lora:
            transformer.add_adapter(lora)
    if lost := {name for name, _ in transformer.named_buffers()} - transformer.state_dict().keys():
        raise ValueError(f"{type(transformer).__name__} computes {', '.join(lost)} when it is built")
    for name, parameter in transformer.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if ".lora_" in name else dtype)
    return transformer


def allocate(transformer: torch.nn.Module, device: torch.device) -> None:
    """Allocates memory for every parameter, or for this process's part of it, without values."""
    transformer._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))


def read_weights(transformer: torch.nn.Module, folder: Path, again: str = "") -> None:
    """Fills all but an adapter's weights from the folder's safetensors; each process reads its own slices."""
    state = {name.replace(".base_layer.", "."): value for name, value in transformer.state_dict().items() if ".lora_" not in name}
    stored = set()
    for file in sorted(folder.glob("*.safetensors")):
        with reading(whole(file, again), again), safe_open(file, "pt") as opened:
            names = list(opened.keys())
            stored |= set(names)
            for key in names:
                shape = opened.get_slice(key).get_shape()
                if key in state and list(state[key].shape) != shape:
                    raise UserError(complaint(file, f"{key} is {shape}, the model's is {list(state[key].shape)}", again))
    if wrong := sorted(stored ^ state.keys()):
        which = "lacks" if wrong[0] in state else "has the unknown weight"
        reason = f"{which} {wrong[0]} ({len(wrong)} such differences): its weights belong to another model, or are incomplete"
        raise UserError(complaint(folder, reason, again))
    with reading(folder, again):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)  # each process reads for itself


def weights_in(run: Path, again: str = "") -> tuple[Path, str | None]:
    """The folder with the weights of a run, and the name of its file if they are a LoRA's.

    run: what `Policy.save` wrote, or any folder with the safetensors of a transformer (diffusers' names) or of a LoRA, anywhere
    below it; again: how to make it again. UserError if there are none, or those of several models.
    """
    for name, file in (("lora", LORA_FILE), ("transformer", None)):
        if (run / name).exists():
            return run / name, file
    files = sorted(run.rglob("*.safetensors"))
    folders = sorted({file.parent for file in files})
    if len(folders) != 1:
        found = (
            f"weights in {len(folders)} folders ({', '.join(map(str, folders[:3]))}): name one" if folders else "no safetensors"
        )
        raise UserError(complaint(run, f"{found}; it must be a transformer or a LoRA in diffusers' layout", again))
    with reading(whole(files[0], again), again), safe_open(files[0], "pt") as opened:
        adapter = any(".lora_" in name or ".lora." in name for name in opened.keys())  # noqa: SIM118 - not iterable itself
    if adapter and len(files) > 1:
        raise UserError(f"{run}: holds {len(files)} LoRAs ({', '.join(file.name for file in files[:3])}): name one")
    return folders[0], files[0].name if adapter else None


def lora_config(base: Base, lora: LoraSettings) -> LoraConfig:
    """The adapter that the settings describe, on the base model's own layers if they name none; its values are not set."""
    targets = list(lora.target_modules or base.lora_targets)
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, init_lora_weights=False)


def load_lora(base: Base, transformer: ModelMixin, folder: Path, file: str, again: str = "") -> None:
    """Adds a LoRA to the transformer, in float32: in diffusers' layout, or in another that diffusers converts.

    UserError if nothing in it is for a transformer of this base model.
    """
    with reading(whole(folder / file, again), again):
        weights, more = base.read_lora(folder, file)
    if not any(name.startswith("transformer.") for name in weights):
        raise UserError(
            f"{folder / file}: no weight in it is named transformer.…, diffusers' name for a LoRA of {base.label}'s transformer"
        )
    with reading(folder / file, again):
        base.pipeline.load_lora_into_transformer(weights, transformer=transformer, **more)
    if not getattr(transformer, "peft_config", None):
        raise UserError(complaint(folder / file, "holds no LoRA of this model", again))
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()


@torch.no_grad()
def draw_lora(transformer: ModelMixin, rank: int, generator: torch.Generator) -> None:
    """Sets a new adapter's values: its first matrix normal with a deviation of 1 / rank, its second zero.

    So it changes nothing yet. The values depend only on the generator, not on the number of processes.
    """
    for name, parameter in transformer.named_parameters():
        if ".lora_" not in name:
            continue
        whole = torch.randn(parameter.shape, generator=generator) / rank if ".lora_A." in name else torch.zeros(parameter.shape)
        whole = whole.to(parameter.device)
        if isinstance(parameter, DTensor):  # None: nothing is sent, each process takes its part
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)
