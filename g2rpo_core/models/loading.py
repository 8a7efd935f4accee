"""Loads a transformer so that no process holds more than its part: build it, spread it, fill it.

Every process reads only its own slices of the safetensors, and casts them as it copies. A single
process works the same way. The steps that spread a model over many GPUs are ordered as in
torchtitan: activation checkpointing, compilation, sharding.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from g2rpo_core.architectures.architecture import Architecture
from g2rpo_core.distributed.process_group import TIMEOUT, ProcessGroup
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import LONGEST, reading, whole
from g2rpo_core.models.quantized import Kind, quantize
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.weights.adapter import Matrices, add, fill, read_adapter
from g2rpo_core.weights.stored import read_weights, shapes_of

Spread = Callable[[ModelMixin], None]
MOST_GRAPHS = 64  # of a kind of block; runs need 4 to 7


def load_transformer(
    architecture: Architecture,
    place: Path,
    device: torch.device,
    dtype: torch.dtype,
    trained: bool,
    lora: LoraConfig | None = None,
    spread: Spread | None = None,
    config: Path | None = None,
    quantized: Kind | None = None,
) -> ModelMixin:
    """Read a transformer from a folder or a file onto `device`.

    dtype: of its parameters; trained: whether they have gradients; lora: an adapter to add, in
    float32: then only it has gradients, and `draw_lora` sets its values; spread: compiles and
    shards the model while it has no data; config: the folder with the model's configuration, if it
    is not that of the files; quantized: how frozen weights are kept (`quantize`), None: in dtype.
    UserError if the files do not hold exactly the model's weights.
    """
    # No from_pretrained: it would read all weights in every process before they are sharded
    transformer = empty_transformer(architecture, config or place, dtype, trained, lora)
    if spread:
        spread(transformer)
    # What is quantized is first read whole, where there is room for it
    allocate(transformer, torch.device("cpu") if quantized else device)
    read_weights(architecture, transformer, place)
    if quantized:
        quantize(transformer, architecture.blocks(transformer), quantized, device)
    return transformer


def empty_transformer(
    architecture: Architecture,
    folder: Path,
    dtype: torch.dtype,
    trained: bool,
    lora: LoraConfig | None = None,
) -> ModelMixin:
    """Return a transformer on the meta device, without data.

    ValueError for a class with buffers that no file holds: they would lack values.
    """
    config = whole(folder / "config.json")
    with torch.device("meta"), reading(config):
        transformer = architecture.transformer.from_config(
            architecture.transformer.load_config(folder)
        )
        transformer.requires_grad_(trained and lora is None)
        architecture.complete(transformer)
    with torch.device("meta"):
        if lora:
            add_adapter(transformer, lora)
    if lost := {name for name, _ in transformer.named_buffers()} - transformer.state_dict().keys():
        raise ValueError(
            f"{type(transformer).__name__} computes {', '.join(lost)} when it is built"
        )
    for name, parameter in transformer.named_parameters():
        # The adapter stays float32: steps of 1e-5 are lost in bfloat16
        parameter.data = parameter.data.to(torch.float32 if ".lora_" in name else dtype)
    return transformer


def add_adapter(transformer: ModelMixin, lora: LoraConfig) -> None:
    """Add a LoRA to a transformer; UserError if it names layers that the transformer lacks."""
    # PEFT takes what matches, and nobody asks what did not
    modules = [name for name, _ in transformer.named_modules()]
    ends = {name.rpartition(".")[2] for name in modules}
    lacking = [
        f"{target}{(like := get_close_matches(target, ends, 1)) and f' (but {like[0]} is)' or ''}"
        for target in sorted(lora.target_modules or ())
        if not any(name == target or name.endswith(f".{target}") for name in modules)
    ]
    if lacking:
        raise UserError(
            f"training.lora.target_modules: no module of {type(transformer).__name__} is called "
            f"{', '.join(lacking)}"
        )
    try:
        transformer.add_adapter(lora)
    except ValueError as error:
        raise UserError(
            f"training.lora.target_modules: {' '.join(str(error).split())[:LONGEST]}"
        ) from None


def describe_trained(sizes: Mapping[str, int]) -> str:
    """Say in a line which modules train, by block and kind, and how many weights they have.

    sizes: elements of every trained parameter, by its name in the transformer.
    """
    of_lora = any(".lora_" in name for name in sizes)
    modules = dict.fromkeys(re.sub(r"\.(lora_.*|weight|bias)$", "", name) for name in sizes)
    blocks: dict[str, dict[str, list[str]]] = {}  # stack of blocks -> number -> kinds of modules
    others = []
    for module in modules:
        if match := re.fullmatch(r"(.*?)\.(\d+)\.(.*)", module):
            stack, number, kind = match.groups()
            blocks.setdefault(stack, {}).setdefault(number, []).append(kind)
        else:
            others.append(module)
    parts = []
    for stack, numbers in blocks.items():
        kinds = dict.fromkeys(kind for of_block in numbers.values() for kind in of_block)
        parts.append(f"{len(numbers)} {stack}" + (f" ({', '.join(kinds)})" if of_lora else ""))
    parts += [f"{len(others)} outside of blocks"] if others else []
    what = "a LoRA on" if of_lora else "all weights of"
    return f"{sum(sizes.values()):,} weights: {what} {len(modules)} modules in {', '.join(parts)}"


def use_attention(transformer: ModelMixin, backend: str | None) -> None:
    """Make all attention of a transformer take a backend of diffusers; None changes nothing.

    UserError where it cannot.
    """
    if backend is None:
        return
    # diffusers passes over a processor without it, and a run would go on with another backend
    if not all(
        hasattr(module.processor, "_attention_backend")
        for module in transformer.modules()
        if hasattr(module, "processor")
    ):
        raise UserError(
            f"sampling.attention: {type(transformer).__name__} "
            "has attention that takes no backend: set it to null"
        )
    try:
        # diffusers sets its default for all models, too: the block restores that
        with attention_backend("native"):
            transformer.set_attention_backend(backend)
    # A package or a GPU that it needs, or its download
    except (RuntimeError, ImportError, ValueError, OSError) as error:
        why = " ".join(str(error).split())[:LONGEST]
        raise _refused(backend, f"cannot be used here ({why})") from None


def check_attention(
    backend: str, device: torch.device, dtype: torch.dtype, *, masked: bool, trained: bool
) -> None:
    """Try a backend of diffusers in a small call; UserError if it differs from the native one.

    masked: whether the base model masks the padding of its texts; trained: whether the gradients of
    query, key and value must be the native ones, too. Backends that only infer (`sage`) return what
    has no gradient, and training would go on without a word.
    """
    # Small and fixed: it must not touch the generator of the run
    draw = torch.Generator().manual_seed(0)
    # [N, tokens, heads, width]
    inputs = [torch.randn(2, 128, 4, 64, generator=draw).to(device, dtype) for _ in range(3)]
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device=device)
    # A hole in the middle: a kernel that only cuts the end would pass otherwise
    mask[0, :, :, 40:70] = False

    def call(name: str, attn_mask: torch.Tensor | None) -> list[torch.Tensor | None]:
        given = [tensor.clone().requires_grad_(trained) for tensor in inputs]
        made = dispatch_attention_fn(
            *given, attn_mask=attn_mask, backend=AttentionBackendName(name)
        )
        gradients = (
            torch.autograd.grad(made.float().square().sum(), given, allow_unused=True)
            if made.requires_grad
            else (None,) * 3
        )
        return [made.detach(), *gradients] if trained else [made.detach()]

    tried = [(None, ""), (mask, " under the mask of padding")] if masked else [(None, "")]
    for given, what in tried:
        native = call("native", given)
        try:
            found = call(backend, given)
        except Exception as error:  # noqa: BLE001 - a kernel's own, whichever it is
            why = " ".join(str(error).split())[:LONGEST]
            raise _refused(backend, f"cannot be used here{what} ({why})") from None
        if trained and any(gradient is None for gradient in found[1:]):
            raise _refused(backend, f"returns no gradients{what}, so that nothing could be trained")
        for name, ours, theirs in zip(("attention", *["gradients"] * 3), found, native):
            if not _alike(ours, theirs):
                raise _refused(backend, f"computes other {name} than the native one{what}")


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Tell whether two tensors are equal but for the rounding of 8 bits."""
    # By norm: single elements of bfloat16 may differ by more
    return bool((ours.float() - theirs.float()).norm() < 0.1 * theirs.float().norm())


def _refused(backend: str, why: str) -> UserError:
    return UserError(f"sampling.attention: {backend} {why}: set it to null")


def check_gradients(
    architecture: Architecture, transformer: ModelMixin, attention: str | None
) -> None:
    """Check after a backward pass that every trained weight has a gradient; UserError otherwise.

    Weights that have no part in the output (`Architecture.idle`) need none.
    """
    # Qwen-Image's last block computes a text stream that nothing reads
    idle = architecture.idle(transformer.config)
    lacking = [
        name
        for name, each in transformer.named_parameters()
        if each.requires_grad and each.grad is None and not name.startswith(idle)
    ]
    if lacking:
        how = (
            f"sampling.attention ({attention}) has no backward"
            if attention
            else "training.lora.target_modules names what has no part"
        )
        more = f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
        raise UserError(f"{lacking[0]}{more} got no gradient from the first backward pass: {how}")


def allocate(transformer: torch.nn.Module, device: torch.device) -> None:
    """Allocate memory for every parameter, or for this process's part of it, without values."""
    transformer._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


def lora_config(architecture: Architecture, lora: LoraSettings) -> LoraConfig:
    """Return the adapter of the settings, by default on the base model's own layers; no values."""
    targets = list(lora.target_modules or architecture.lora_targets)
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, init_lora_weights=False
    )


def load_lora(architecture: Architecture, transformer: ModelMixin, file: Path) -> None:
    """Add the LoRA in a file to the transformer, in float32 (`read_adapter`)."""
    add(transformer, read_lora(architecture, transformer, file))


def read_lora(
    architecture: Architecture, transformer: ModelMixin, file: Path
) -> dict[str, Matrices]:
    """Read a LoRA for this transformer; errors as `read_adapter`."""
    return read_adapter(
        architecture, transformer.config, shapes_of(architecture, transformer.config), file
    )


@torch.no_grad()
def draw_lora(transformer: ModelMixin, rank: int, generator: torch.Generator) -> None:
    """Set a new adapter's values: its first matrix normal with std 1 / rank, its second zero.

    So it changes nothing yet. The values depend only on the generator, not on the number of
    processes.
    """
    for name, parameter in transformer.named_parameters():
        if ".lora_" not in name:
            continue
        # As PEFT's `gaussian` draws it
        whole = (
            torch.randn(parameter.shape, generator=generator) / rank
            if ".lora_A." in name
            else torch.zeros(parameter.shape)
        )
        fill(parameter, whole)  # each process has drawn all


def parallelize(
    transformer: ModelMixin,
    blocks: Sequence[torch.nn.Module],
    settings: ParallelSettings,
    dtype: torch.dtype,
    processes: ProcessGroup,
    device: torch.device,
) -> None:
    """Compile and shard the transformer in place, as `training.parallel` says.

    It has no data yet, or is on its device. blocks: those of the transformer that are compiled and
    sharded one by one; dtype: of the computation and of gathered weights; masters and gradients
    keep the parameters' dtype; device: where the weights will be. UserError if the number of
    processes is not a multiple of `shard_size`.
    """
    # Blocks, not the model: one graph serves all blocks of a kind
    if settings.compile:
        apply_compile(blocks)
    if processes.size > 1:
        if (
            settings.shard_size
            and processes.size > settings.shard_size
            and processes.size % settings.shard_size
        ):
            raise UserError(
                f"training.parallel.shard_size: {processes.size} processes cannot be divided into "
                f"groups of {settings.shard_size}"
            )
        apply_fsdp(transformer, blocks, dtype, device, settings.shard_size)


def apply_compile(blocks: Sequence[torch.nn.Module]) -> None:
    """Compile every block in place: blocks of a kind share their compiled graphs.

    A kind has a graph for each of: with and without gradients; a batch of one, of the first size,
    of any size; a LoRA at zero. By default torch (2.13.0, torch/_dynamo/config.py,
    `recompile_limit`) makes 8 of a code object, which all blocks of a kind share, and then runs
    them uncompiled with a line in its own log: rollout and update would differ. Here that is a
    UserError.
    """
    if torch._dynamo.config.disable:
        raise UserError(
            "training.parallel.compile: the environment disables it: "
            "unset TORCH_COMPILE_DISABLE, or set it to false"
        )
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in blocks:
        block.compile()
        block._compiled_call_impl = partial(_call_compiled, block._compiled_call_impl)


def _call_compiled(compiled: Callable[..., object], *arguments: object, **named: object) -> object:
    """Call a compiled block with arguments that are laid out alike for every block of its kind."""
    try:
        arguments, named = tree_map_only(torch.Tensor, _own, (arguments, named))
        return compiled(*arguments, **named)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise UserError(
            f"training.parallel.compile: a block needs more than {MOST_GRAPHS} graphs "
            f"({' '.join(str(error).split())[:LONGEST]}): set it to false"
        ) from None


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that is no view: the compiler tells those apart."""
    # The first block gets a view of an embedding, later ones parts of what a block returned
    return (
        tensor
        if tensor._base is None and tensor.is_contiguous()
        else tensor.clone(memory_format=torch.contiguous_format)
    )


def apply_fsdp(
    transformer: ModelMixin,
    blocks: Sequence[torch.nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    shard_size: int | None = None,
) -> None:
    """Shard every block and the layers around them over all processes.

    With `shard_size`, over groups of that many, each with a copy (hybrid). Gradients are means over
    all processes, summed in float32. Inputs are not cast: sigma reaches the model in float32, and
    autocast decides what is computed in `dtype`.
    """
    size = torch.distributed.get_world_size()
    shape: tuple[int, ...] = (size,)
    names: tuple[str, ...] = ("shard",)
    if shard_size and shard_size < size:
        shape, names = ((size // shard_size, shard_size), ("replicate", "shard"))
    mesh = torch.distributed.init_device_mesh(device.type, shape, mesh_dim_names=names)
    for dimension in names:  # groups that PyTorch makes have its own limit, ten minutes on GPUs
        _set_pg_timeout(TIMEOUT, mesh.get_group(dimension))
    # Gradients are summed in float32: 16 processes in bfloat16 would lose small ones
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # The rest last, as FSDP2 asks: it takes what no block has
    fully_shard(transformer, mesh=mesh, mp_policy=precision)


def reduce_gradients(transformer: torch.nn.Module, now: bool) -> None:
    """Set whether the next backward pass sums gradients over processes, or keeps them unsharded."""
    if isinstance(transformer, FSDPModule):
        transformer.set_requires_gradient_sync(now)


def reshard(transformer: torch.nn.Module) -> None:
    """Leave every process only its part of the weights.

    After a forward without gradients, FSDP2 keeps the root module gathered; its parameters are then
    copies in the dtype of the computation, which must not be saved instead of the masters.
    """
    if isinstance(transformer, FSDPModule):
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def refresh(replica: torch.nn.Module, transformer: torch.nn.Module) -> None:
    """Copy sharded weights into an unsharded replica, gathering one at a time; collective."""
    # First, or the root would be copied as it is gathered, in the dtype of the computation
    reshard(transformer)
    for copy, parameter in zip(replica.parameters(), transformer.parameters()):
        copy.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    for copy, buffer in zip(replica.buffers(), transformer.buffers()):
        copy.copy_(buffer)
