"""All that this project does on a GPU alone; elsewhere a device is a value that is handed on.

A GPU also runs code of other libraries that no CPU does: NCCL (`distributed/process_group.py`),
autocast (`models/policy.py`), compiled blocks (`models/loading.py`), layers in 8 or 4 bits
(`models/quantized.py`). benchmarks/README.md says which of it has run.
"""

import os

import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.numerics import driver

# Attention of diffusers with which nothing can be trained, see `prepare`
WITHOUT_BACKWARD = ("_native_cudnn",)
# By which libraries compute other numbers unseen -> the value that changes nothing
NEUTRAL = {
    "DIFFUSERS_ATTN_BACKEND": "native",  # diffusers 0.42.1: models/attention_dispatch.py
    "TRANSFORMERS_SDPA_FORCE_GQA": "0",  # transformers 5.23.0: integrations/sdpa_attention.py
    "NVIDIA_TF32_OVERRIDE": "0",  # cuBLAS and cuDNN
}


def prepare(device: torch.device) -> torch.device:
    """Prepare this process to compute on a device, and return it.

    Called wherever a process learns its device. On an H100 PyTorch prefers cuDNN's attention. In
    FLUX's blocks its backward gave gradients that were NaN, or read memory that is not its own
    (torch 2.11.0, cuDNN 9.19, 26 November 2026); with flash and memory-efficient attention
    gradients were those of the plain formula. Matrix products of float32 are in float32, whatever
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE says, which NVIDIA's images set. UserError if the environment
    changes numbers in a way that no setting shows.
    """
    for name, value in NEUTRAL.items():
        if os.environ.get(name, value) != value:
            raise UserError(
                f"{name}: is {os.environ[name]!r} in the environment, which changes numbers and "
                "stands in no record: unset it (attention is chosen by sampling.attention)"
            )
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("highest")
    return device


def why_none() -> str:
    """Return why torch finds no GPU here, and the command that mends it."""
    return driver.why_no_gpu(torch.__version__, torch.version.cuda, driver.find_version())


def wait(device: torch.device) -> None:
    """Wait until everything that was started on a device is done, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Begin to measure the largest allocation anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the most bytes that tensors took and that the allocator held; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def describe(device: torch.device) -> str:
    """Return the name of a GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
