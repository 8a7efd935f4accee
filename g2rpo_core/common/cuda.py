"""All that this project does on a GPU alone; everywhere else, the device is a value that is handed on.

Also reached only with a GPU, in other libraries' code: NCCL (`distributed/process_group.py`), autocast to bfloat16 (`models/policy.py`),
compiled blocks (`models/loading.py`), weights in 8 or 4 bits (`models/quantized.py`). `benchmarks/gpu_hour.py` runs each of them but NCCL.
"""

import torch


def prepare(device: torch.device) -> torch.device:
    """Prepare this process to train and sample on a device, and return it; called where a process learns its device.

    PyTorch prefers cuDNN's attention on an H100. With FLUX's blocks its backward made gradients NaN, or read memory that is not its own
    (torch 2.11.0, cuDNN 9.19, 26 November 2026), while flash and memory-efficient attention agreed with the plain formula.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def wait(device: torch.device) -> None:
    """Wait until everything that was started on a device is done, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Begin to measure the largest allocation anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that tensors took at most, and those that the allocator held at most; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def describe(device: torch.device) -> str:
    """Return the name of a GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
