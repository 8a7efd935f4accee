"""Simulate a machine with GPUs: tensors have shapes, dtypes and devices, but no data.

The device `cuda` then works without a GPU and its driver, on every build of torch, with autograd,
autocast, FSDP2 and AdamW. All that is replaced here is PyTorch's:

- CUDA's hooks and device guard: a stub that does nothing (`stub.py`, loaded before torch);
- `torch.cuda`'s streams, events and queries; numbers read from tensors are 0, 1 or true;
- attention and RMSNorm as in CUDA's kernels: a CPU build's formulas keep more memory;
- `Tensor.numpy` and `Module._apply`, which do not take tensors without data;
- torch.distributed: its `fake` backend, one process of many, whose collectives return at once, and
  meshes with data.

What it cannot show: workspaces of kernels and of NCCL, fragmentation, speed, overlap, numerics, a
collective that hangs.
"""

from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from g2rpo_core.models.cost import FusedRMSNorm, rms_norm_under_autocast

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


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


class Nothing(MagicMock):
    """A stream or an event of the simulated GPU: every method does nothing."""

    device = CUDA


def gpus(count: int, memory: float) -> None:
    """Make torch.cuda look like `count` GPUs of `memory` GiB, of which this process has the first.

    For good: this process computes nothing else.
    """
    # Numbers read from tensors
    for operation in (aten.item.default, aten._local_scalar_dense.default):
        fake_impls.op_implementations_dict[operation] = number
    # The autograd engine would start a thread for a device that does not exist
    torch.autograd.set_multithreading_enabled(False)
    nothing, total = Nothing(), int(memory * 2**30)
    # What torch.cuda tells of itself
    answers: dict[str, object] = {
        **dict.fromkeys(("set_device", "init", "_lazy_init", "synchronize"), None),
        **dict.fromkeys(("empty_cache", "manual_seed_all"), None),
        **dict.fromkeys(("current_stream", "default_stream"), nothing),
        "is_available": True,
        "device_count": count,
        "current_device": 0,
        "stream": nullcontext(),
        "is_bf16_supported": True,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "get_device_name": "simulated",
        "mem_get_info": (total, total),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_stream = lambda *_: nothing
    # What a CPU build computes by other formulas, or not at all without data
    F.scaled_dot_product_attention = _attention(F.scaled_dot_product_attention)
    F.rms_norm = _rms_norm(F.rms_norm)
    torch.nn.Module._apply = _apply
    torch.Tensor.numpy = _numpy(torch.Tensor.numpy)


def _attention(plain):
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **how):
        if query.device.type != "cuda":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **how)
        if attn_mask is not None:
            # the plain function asks a CUDA build for the version of its cuDNN
            given = (query, key, value, attn_mask, dropout_p, is_causal)
            return aten._scaled_dot_product_attention_math(*given, **how)[0]
        cast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if cast else query.dtype
        given, how = [each.to(dtype) for each in (query, key, value)], {"scale": how.get("scale")}
        if dtype in (torch.bfloat16, torch.float16):
            return aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, **how)[0]
        given += [None, torch.is_grad_enabled() and query.requires_grad]
        return aten._scaled_dot_product_efficient_attention(*given, dropout_p, is_causal, **how)[0]

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
    for key, old in self._parameters.items():
        if old is not None and not hasattr(old, "became"):
            with torch.no_grad():
                made = fn(old)
            if made is old:
                continue
            old.became = torch.nn.Parameter(made, old.requires_grad)
        self._parameters[key] = old if old is None else old.became
    for key, buffer in self._buffers.items():
        self._buffers[key] = None if buffer is None else fn(buffer)
    return self


def _numpy(plain):
    def numpy(self: torch.Tensor, *, force: bool = False):
        if not isinstance(self, FakeTensor):
            return plain(self, force=force)
        dtype = "float32" if self.dtype.is_floating_point else str(self.dtype)[len("torch.") :]
        return np.zeros(tuple(self.shape), dtype)

    return numpy


def join(size: int) -> None:
    """Make this process the first of `size`, and let meshes have data."""
    with unset_fake_temporarily():
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    dist.init_device_mesh = unset_fake_temporarily()(dist.init_device_mesh)
