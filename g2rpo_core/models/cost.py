"""Cost of a transformer's calls, by tracing its own code: FLOPs, and bytes of intermediates.

Tracing is on PyTorch's fake tensors: nothing is allocated. Every operation reports its output's
size, and a tensor counts from the operation that makes it until it is freed.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from g2rpo_core.architectures.architecture import Architecture, Config
from g2rpo_core.models.kept import kept
from g2rpo_core.models.loading import add_adapter, lora_config
from g2rpo_core.models.settings import LoraSettings

# Of dense products in bfloat16, by the data sheets; the first key that torch's name of the GPU
# contains holds
PEAK_TFLOPS = {
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "A800": 312,
    "B200": 2250,
    "L40S": 362,
}
aten = torch.ops.aten
# PyTorch counts attention on a GPU; on the CPU, where models are traced, the counts are the same
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda out, q, k, v, *_, **__: (
        sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape)
    ),
}


class Measured(TorchDispatchMode):
    """Measures the operations inside its block, fake or real: FLOPs, live bytes and their peak."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = self.flops = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if count := ATTENTION.get(operation.overloadpacket) or flop_registry.get(
            operation.overloadpacket
        ):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        # Views and in-place operations return storage that is counted already
        given = {
            id(tensor.untyped_storage())
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known and id(storage) not in given:
                    self._known.add(storage)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    # PyTorch reports no freed memory, but its storages die
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size: int) -> None:
        self.alive -= size


class FusedRMSNorm(torch.autograd.Function):
    """RMSNorm without arithmetic: its shapes, and what it keeps for the backward.

    That is what CUDA's fused kernel keeps (input, weight, one float32 per row); a CPU build keeps
    more.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def rms_norm_under_autocast(input, normalized_shape, weight=None, eps=None):
    """Compute rms_norm in float32 as CUDA's autocast does; the CPU's has no rule for it."""
    return FusedRMSNorm.apply(input.float(), None if weight is None else weight.float())


def flash_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attend without a mask as CUDA's flash kernel does, in bfloat16 as under autocast.

    A CPU build uses a kernel that keeps more.
    """
    qkv = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention(
        *qkv, dropout_p, is_causal, scale=scale
    )[0]


@contextmanager
def as_on_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Run the block as under CUDA's autocast, on CPU tensors without data.

    Norms compute in float32, where the CPU's autocast stays in bfloat16.
    """
    if dtype == torch.float32:
        yield
        return
    layer_norm = torch.nn.functional.layer_norm
    wide = lambda x, *args, **kwargs: layer_norm(x.float(), *args, **kwargs)
    with (
        torch.autocast("cpu", dtype),
        patch("torch.nn.functional.layer_norm", wide),
        patch("torch.nn.functional.rms_norm", rms_norm_under_autocast),
        patch("torch.nn.functional.scaled_dot_product_attention", flash_attention),
    ):
        yield


@dataclass(frozen=True)
class Cost:
    """What a call of a model takes."""

    bytes: int
    """Peak of the intermediate tensors, without weights and their gradients."""
    flops: int
    """Of all operations."""


def make_transformer(
    architecture: Architecture, config: Config, lora: LoraSettings | None
) -> torch.nn.Module:
    """Build a transformer of a configuration, with an adapter if there are settings of one."""
    transformer = architecture.transformer(**config)
    if lora:
        transformer.requires_grad_(False)
        add_adapter(transformer, lora_config(architecture, lora))
    return transformer


@dataclass(frozen=True)
class Call:
    """A forward of `batch` latents, each with its prompt, and a backward if `training`."""

    batch: int
    image_tokens: int
    text_tokens: int
    dtype: torch.dtype
    """Of the weights."""
    training: bool
    lora: LoraSettings | None = None
    checkpointing: bool = False


def transformer_cost(architecture: Architecture, config: Config, call: Call) -> Cost:
    """Return the cost of a call of a base model's transformer.

    Bytes and operations grow by the same amount with every block of a kind, so a few shallow models
    give those of any depth.
    """
    # Two kinds of blocks: three shallow models are traced, not one of 57 blocks
    shallow, deeper = architecture.shallow(config)
    first = _traced_once(architecture, tuple(shallow.items()), call)
    size, flops = first.bytes, first.flops
    for deep, more in deeper:
        cost = _traced_once(architecture, tuple(deep.items()), call)
        size += more * (cost.bytes - first.bytes)
        flops += more * (cost.flops - first.flops)
    return Cost(size, flops)


@cache
def _traced_once(
    architecture: Architecture, config: tuple[tuple[str, Any], ...], call: Call
) -> Cost:
    return Cost(
        **kept(
            "call",
            (architecture.label, config, call),
            lambda: asdict(traced_cost(architecture, dict(config), call)),
        )
    )


def traced_cost(architecture: Architecture, config: Config, call: Call) -> Cost:
    """Compute `transformer_cost` by tracing the whole model of `config`."""
    # Weights without data, in the dtype that they have on a GPU. Their gradients are freed at once:
    # the peak is of intermediate tensors alone
    with torch.device("meta"):
        transformer = make_transformer(architecture, config, call.lora)
    with FakeTensorMode():
        architecture.complete(transformer)
        for module in transformer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    kind = torch.float32 if call.lora and parameter.requires_grad else call.dtype
                    fake = torch.nn.Parameter(
                        torch.empty(parameter.shape, dtype=kind), parameter.requires_grad
                    )
                    module._parameters[name] = fake
                    if parameter.requires_grad:
                        fake.register_post_accumulate_grad_hook(
                            lambda weight: setattr(weight, "grad", None)
                        )
            for name, buffer in module._buffers.items():
                module._buffers[name] = (
                    None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)
                )
        if call.checkpointing and call.training:
            transformer.enable_gradient_checkpointing()
        arguments = architecture.inputs(
            config, call.batch, call.image_tokens, call.text_tokens, "cpu"
        )
        # One call, measured
        with Measured() as measured, as_on_cuda(call.dtype), torch.set_grad_enabled(call.training):
            output = transformer(**arguments)[0]
            output = (torch.stack(output) if isinstance(output, list) else output).float()
            if call.training:
                output.sum().backward()
    return Cost(measured.peak, measured.flops)
