"""Simulate a machine with GPUs: tensors have shapes, dtypes and devices, but no data.

The device `cuda` then works without a GPU and its driver, on every build of torch, with autograd,
autocast, FSDP2 and AdamW. This patches other libraries, all of them here; what a rehearsal replaces
of this project's own code goes through `g2rpo_core.distributed.runtime.Runtime`:

- CUDA's hooks and device guard: a stub that does nothing (`stub.py`, loaded before torch);
- `torch.cuda`'s streams, events and queries; numbers read from tensors are 0, 1 or true;
- attention and RMSNorm as in CUDA's kernels: a CPU build's formulas keep more memory;
- `Tensor.numpy` and `Module._apply`, which do not take tensors without data;
- `UntypedStorage.resize_` and the trials of DTensor, which a meter does not see as operations;
- torch.distributed: its `fake` backend, one process of many, whose collectives return at once, and
  meshes with data;
- diffusers, transformers, open_clip, safetensors: models are made from their configuration, and
  written files stay empty.

What it cannot show: workspaces of kernels and of NCCL, fragmentation, speed, overlap, numerics, a
collective that hangs.
"""

import contextlib
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from g2rpo_core.models.cost import FusedRMSNorm, rms_norm_under_autocast

GIB = 2**30
NOTHING_WRONG: dict[str, list] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
aten = torch.ops.aten


class WithoutData(FakeTensorMode):
    """Tensors that are made under it have no data.

    Small real ones (token ids, encoded prompts) lose theirs at their first use.
    """

    avoid_device_init = True  # torch.tensor(..., device="cuda") would allocate

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def number(_mode, _operation, tensor: torch.Tensor) -> bool | float | int:
    """Return what `.item()` returns for a tensor without data."""
    if tensor.constant is not None:
        return tensor.constant.item()
    return True if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 1


class _Nothing:
    """A stream or an event of the simulated GPU: every method does nothing."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> "_Nothing":
        return self

    def record_event(self, event: "_Nothing | None" = None) -> "_Nothing":
        return event or _Nothing()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def gpus(count: int, local: int, memory: float) -> None:
    """Make torch.cuda look like `count` GPUs of `memory` GiB; this process has number `local`."""
    # Numbers read from tensors
    for operation in (aten.item.default, aten._local_scalar_dense.default):
        fake_impls.op_implementations_dict[operation] = number
    # The autograd engine would start a thread for a device that does not exist
    torch.autograd.set_multithreading_enabled(False)
    _Nothing.device = torch.device("cuda", local)
    stream, nothing, total = _Nothing(), lambda *_, **__: None, int(memory * GIB)
    properties = types.SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=total, multi_processor_count=132
    )
    # What torch.cuda tells of itself
    stand_ins: dict[str, object] = {
        **dict.fromkeys(
            ("set_device", "init", "_lazy_init", "synchronize", "empty_cache", "manual_seed_all"),
            nothing,
        ),
        **dict.fromkeys(("Stream", "Event"), _Nothing),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: stream),
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: local,
        "stream": lambda _: contextlib.nullcontext(),
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: "simulated",
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (total, total),
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_stream = lambda *_: stream
    # What a CPU build computes by other formulas, or not at all without data
    F.scaled_dot_product_attention = _attention(F.scaled_dot_product_attention)
    F.rms_norm = _rms_norm(F.rms_norm)
    torch.nn.Module._apply = _apply
    torch.Tensor.numpy = _numpy


def _attention(plain):
    def attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        if query.device.type != "cuda":
            return plain(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if (
            attn_mask is not None
        ):  # the plain function asks a CUDA build for the version of its cuDNN
            how = {"scale": scale, "enable_gqa": enable_gqa}
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, **how
            )[0]
        qkv = [query, key, value]
        if torch.is_autocast_enabled("cuda"):
            qkv = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in qkv]
        if qkv[0].dtype in (torch.bfloat16, torch.float16):
            return aten._scaled_dot_product_flash_attention(
                *qkv, dropout_p, is_causal, scale=scale
            )[0]
        keep = torch.is_grad_enabled() and query.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            *qkv, None, keep, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def _rms_norm(plain):
    def rms_norm(input, normalized_shape, weight=None, eps=None):
        if input.device.type != "cuda":
            return plain(input, normalized_shape, weight, eps)
        # in the float32 list of CUDA's autocast, but not in the CPU's
        if torch.is_autocast_enabled("cuda"):
            return rms_norm_under_autocast(input, normalized_shape, weight, eps)
        return FusedRMSNorm.apply(input, weight)

    return rms_norm


def _apply(self: torch.nn.Module, fn, recurse: bool = True) -> torch.nn.Module:
    """Replace parameters one by one, tied ones by one tensor.

    torch's own method swaps data, which these tensors do not have.
    """
    for child in self.children() if recurse else ():
        child._apply(fn)
    for key, parameter in self._parameters.items():
        if parameter is None:
            continue
        new = getattr(parameter, "_became", None)
        if new is None:
            with torch.no_grad():
                made = fn(parameter)
            if made is parameter:
                continue
            new = (
                made
                if isinstance(made, torch.nn.Parameter)
                else torch.nn.Parameter(made, parameter.requires_grad)
            )
            parameter._became = new
        self._parameters[key] = new
    for key, buffer in self._buffers.items():
        self._buffers[key] = None if buffer is None else fn(buffer)
    return self


_plain_numpy = torch.Tensor.numpy


def _numpy(self: torch.Tensor, *, force: bool = False):
    import numpy

    if not isinstance(self, FakeTensor):
        return _plain_numpy(self, force=force)
    return numpy.zeros(
        tuple(self.shape),
        {torch.uint8: "uint8", torch.int64: "int64", torch.bool: "bool"}.get(self.dtype, "float32"),
    )


def join_as(rank: int, size: int) -> None:
    """Make this process number `rank` of `size`, and let meshes have data."""
    with unset_fake_temporarily():
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    made = dist.init_device_mesh

    def outside(*arguments, **more):
        with unset_fake_temporarily():
            return made(*arguments, **more)

    dist.init_device_mesh = outside
    # It compares every tensor with every tensor, 780² in a step of AdamW, for a kind of sharding
    # that FSDP2 alone does not use
    _sharding_prop._propagate_use_strided_shard_flag = lambda *_: None


def storages(
    resized: Callable[[torch.UntypedStorage], None],
    pause: Callable[[], AbstractContextManager[None]],
) -> None:
    """Call `resized` after a storage changed its size; run DTensor's shape tries in `pause()`."""
    plain_resize, plain_propagate = (
        torch.UntypedStorage.resize_,
        ShardingPropagator._propagate_tensor_meta_non_cached,
    )

    def resize_(storage, size):
        result = plain_resize(storage, size)
        resized(storage)
        return result

    def propagate(propagator, schema):
        with pause():
            return plain_propagate(propagator, schema)

    torch.UntypedStorage.resize_ = resize_
    ShardingPropagator._propagate_tensor_meta_non_cached = propagate


def files(written: Callable[[object], None]) -> None:
    """Make models from their configuration instead of reading files.

    Calls `written` with the tensors of files, which stay empty.
    """
    import open_clip.factory
    import transformers
    from diffusers.models import modeling_utils

    def of_diffusers(cls, folder, dtype=torch.float32, output_loading_info=False, **_):
        model = cls.from_config(cls.load_config(folder)).to(dtype).eval()
        return (model, NOTHING_WRONG) if output_loading_info else model

    def of_transformers(
        cls,
        folder,
        *_,
        dtype=torch.float32,
        config=None,
        subfolder="",
        output_loading_info=False,
        **__,
    ):
        model = cls(cls.config_class.from_pretrained(Path(folder, subfolder))).to(dtype).eval()
        return (model, NOTHING_WRONG) if output_loading_info else model

    def save_file(tensors, path, **_):
        written(tensors)
        Path(path).touch()

    modeling_utils.ModelMixin.from_pretrained = classmethod(of_diffusers)
    transformers.PreTrainedModel.from_pretrained = classmethod(of_transformers)
    # it draws until the values are within bounds
    transformers.PreTrainedModel.initialize_weights = lambda model: None
    open_clip.factory.load_checkpoint = lambda *_, **__: {}
    modeling_utils.safetensors.torch.save_file = save_file
