"""One model on many GPUs, in three steps ordered as in torchtitan: activation checkpointing, compilation, sharding."""

from collections.abc import Sequence

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.errors import UserError
from g2rpo_core.models.settings import ParallelSettings


def parallelize(
    transformer: ModelMixin,
    blocks: Sequence[torch.nn.Module],
    settings: ParallelSettings,
    dtype: torch.dtype,
    processes: ProcessGroup,
    device: torch.device,
) -> None:
    """Compiles and shards the transformer in place, as `training.parallel` says; it has no data yet, or is on its device.

    blocks: those of the transformer that are compiled and sharded one by one.

    dtype: of the computation and of gathered weights; masters and gradients keep the parameters' dtype; device: where the weights
    will be. UserError if the number of processes is not a multiple of `shard_size`.
    """
    if settings.compile:
        apply_compile(blocks)
    if processes.size > 1:
        if settings.shard_size and processes.size > settings.shard_size and processes.size % settings.shard_size:
            raise UserError(
                f"training.parallel.shard_size: {processes.size} processes cannot be divided into groups of {settings.shard_size}"
            )
        apply_fsdp(transformer, blocks, dtype, device, settings.shard_size)


def apply_gradient_checkpointing(transformer: ModelMixin) -> None:
    """Makes every block keep only its inputs and recompute its activations in the backward pass."""
    transformer.enable_gradient_checkpointing()


def apply_compile(blocks: Sequence[torch.nn.Module]) -> None:
    """Compiles every block in place: blocks of a kind share one compiled graph."""
    for block in blocks:
        block.compile()


def apply_fsdp(
    transformer: ModelMixin,
    blocks: Sequence[torch.nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    shard_size: int | None = None,
) -> None:
    """Shards every block and the layers around them over all processes, or over groups of `shard_size` with a copy each (hybrid).

    Gradients are means over all processes, summed in float32. Inputs are not cast: sigma reaches the model in float32, and
    autocast decides what is computed in `dtype`.
    """
    size = torch.distributed.get_world_size()
    shape: tuple[int, ...] = (size,)
    names: tuple[str, ...] = ("shard",)
    if shard_size and shard_size < size:
        shape, names = ((size // shard_size, shard_size), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(transformer, mesh=mesh, mp_policy=precision)


def reduce_gradients(transformer: torch.nn.Module, now: bool) -> None:
    """Sets whether the next backward pass sums its gradients over the processes, or leaves that to a later pass (unsharded)."""
    if isinstance(transformer, FSDPModule):
        transformer.set_requires_gradient_sync(now)


def reshard(transformer: torch.nn.Module) -> None:
    """Leaves every process only its part of the weights.

    After a forward without gradients, FSDP2 keeps the root module gathered; its parameters are then copies in the dtype of the
    computation, which must not be saved instead of the masters.
    """
    if isinstance(transformer, FSDPModule):
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def refresh(replica: torch.nn.Module, transformer: torch.nn.Module) -> None:
    """Copies sharded weights into an unsharded replica of the same layout, gathering one at a time; collective."""
    reshard(transformer)
    for copy, parameter in zip(replica.parameters(), transformer.parameters()):
        copy.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    for copy, buffer in zip(replica.buffers(), transformer.buffers()):
        copy.copy_(buffer)
