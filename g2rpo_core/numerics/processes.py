"""Find the device that a process works on, and describe the machine."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version

import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.numerics.cuda import prepare, why_none
from g2rpo_core.numerics.pins import read_processor
from g2rpo_core.numerics.portable import in_use

PACKAGES = ("torch", "numpy", "transformers", "diffusers")
INSTRUCTIONS = ("avx2", "fma", "avx512f")  # by which sums run in another order
# Our names -> Linux's, in /proc/cpuinfo
NUMBERS = {"vendor": "vendor_id", "family": "cpu family", "model": "model"}


def device_of(word: str | None) -> torch.device:
    """Return the device that a user named as torch does; by default a GPU, if any, or the CPU.

    UserError if torch knows no such device, or finds none here.
    """
    try:
        device = torch.device(word or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"--device {word}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {word}: only cuda and cpu are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        if count := torch.cuda.device_count():
            raise UserError(f"--device {word}: torch finds {count} GPU here")
        raise UserError(f"--device {word}: torch finds no GPU here: {why_none()}")
    return prepare(device)


def describe_machine() -> dict[str, object]:
    """Return what timings and last digits depend on: hardware, threads, numerics and versions."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()}, {os.cpu_count()} CPUs"
    )
    return {
        "device": device,
        "processor": describe_processor(read_processor()),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "numerics": in_use(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
    }


def version_of(package: str) -> str:
    """Return the installed version of a package; torch's with its build.

    The metadata of PyPI's CUDA build lack that.
    """
    return str(torch.__version__) if package == "torch" else version(package)


def describe_processor(said: Mapping[str, str]) -> dict[str, object]:
    """Return a processor's name, vendor, family, model and INSTRUCTIONS.

    said: what Linux says of it (`pins.read_processor`).
    """
    if not said:
        return {"name": platform.processor() or platform.machine()}
    has = said.get("flags", "").split()
    return {
        "name": said.get("model name", platform.machine()),
        **{key: said[of_linux] for key, of_linux in NUMBERS.items() if of_linux in said},
        **{name: name in has for name in INSTRUCTIONS},
    }
