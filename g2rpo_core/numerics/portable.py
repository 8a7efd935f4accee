"""Replaces by numpy's what no pin makes portable in torch on the CPU.

These are matrix products, square roots, and the logarithm of float64. MKL, which torch's wheels
link, has one code path for each vendor; only its COMPATIBLE mode (SSE2, a fifth of the speed) is
the same on all. numpy's OpenBLAS runs its Haswell kernels wherever OPENBLAS_CORETYPE asks for them.
MKL's square root and logarithm start from an approximation that every vendor makes in its own way;
numpy's root is that of IEEE 754. The logarithm of float32 comes out the same all the same: so did
each of the 33 million values from 1/4 to 2 and from 2^-8 to 2^-7. `torch.log2` and `torch.atan` do
not; nothing here uses them.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.numerics.pins import PINS, Numerics, are_set, processor_problem

REAL = (torch.float32, torch.float64)
# The replaced operations, which act as long as this lives; empty until `install`
_library: list[torch.library.Library] = []


def use(numerics: Numerics) -> None:
    """Compute by a profile's setting from now on; UserError if portable numerics cannot be had."""
    if numerics == "native":
        return
    if numerics == "deterministic":
        return use_deterministic()
    if problem := processor_problem():
        raise UserError(
            f"numerics: portable {problem}: set numerics: native in the profile; "
            "its results have other bits"
        )
    if not are_set():
        pins = " ".join(
            f"{name}={value!r}" if " " in value else f"{name}={value}"
            for name, value in PINS.items()
        )
        raise UserError(
            f"numerics: portable has to be set before torch is imported: export {pins}, "
            "and start again"
        )
    install()


def in_use() -> Numerics:
    """Say which numerics this process computes with."""
    if _library:
        return "portable"
    return "deterministic" if torch.are_deterministic_algorithms_enabled() else "native"


def use_deterministic() -> None:
    """Make GPU runs bitwise deterministic: sums in one order; to be called before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Only for code that reads memory that nobody wrote
    torch.utils.deterministic.fill_uninitialized_memory = False


def install() -> None:
    """Replace the operations for this process, once; autograd stays torch's."""
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    for name, make in (
        ("mm", _product),
        ("bmm", _product),
        ("addmm", _sum),
        ("baddbmm", _sum),
        ("sqrt", partial(_function, np.sqrt, REAL)),
        ("sqrt_", partial(_function, np.sqrt, REAL, in_place=True)),
        ("log", partial(_function, np.log, REAL[1:])),
        ("log_", partial(_function, np.log, REAL[1:], in_place=True)),
    ):
        function = make(torch.library.get_kernel(f"aten::{name}", "CPU"))
        with warnings.catch_warnings():
            # that a kernel is replaced
            warnings.simplefilter("ignore")
            library.impl(name, function, "CPU", with_keyset=True, allow_override=True)
    # Fused attention calls MKL inside; its parts do not
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _library.append(library)


def _product(before: Any) -> Callable:
    """Make `mm` and `bmm`; before: the kernel of all other dtypes."""

    def product(keys, a, b):
        return (
            matmul(a, b)
            if a.dtype in REAL and b.dtype == a.dtype
            else before.call_boxed(keys, a, b)
        )

    return product


def _sum(before: Any) -> Callable:
    """Make `addmm` and `baddbmm`: beta * c + alpha * a @ b."""

    def added(keys, c, a, b, *, beta=1, alpha=1):
        if a.dtype not in REAL or not a.dtype == b.dtype == c.dtype:
            return before.call_boxed(keys, c, a, b, beta=beta, alpha=alpha)
        out = matmul(a, b)
        if alpha != 1:
            out.mul_(alpha)
        return out.add_(c, alpha=beta) if beta != 0 else out

    return added


def _function(of_numpy: np.ufunc, dtypes: tuple, before: Any, in_place: bool = False) -> Callable:
    """Make a function of each value, also in place; before: the kernel of all other dtypes."""

    def function(keys, x):
        if x.dtype not in dtypes:
            return before.call_boxed(keys, x)
        out = x if in_place else torch.empty_like(x)
        with np.errstate(all="ignore"):  # as torch, which does not warn of inf and nan
            of_numpy(_array(x), out=_array(out))
        return out

    return function


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply [..., m, k] by [..., k, n] on the CPU, float32 or float64, by numpy."""
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    if out.numel():
        with np.errstate(all="ignore"):
            np.matmul(_array(a), _array(b), out=_array(out))
    return out


def _array(x: torch.Tensor) -> np.ndarray:
    """Return numpy's view of a tensor's memory."""
    # Not Tensor.numpy, which would forbid FSDP to free that memory later
    return np.from_dlpack(x.detach())
