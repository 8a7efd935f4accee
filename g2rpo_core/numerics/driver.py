"""Finds this machine's NVIDIA driver, and says which of PyTorch's builds it runs.

It needs the standard library alone: `make env` asks before there is more. Oldest drivers: NVIDIA,
"CUDA Compatibility", minor-version compatibility, table 1. Within CUDA 12 or 13 an older driver
runs a newer toolkit's programs.
"""

import re
import shutil
import subprocess
from pathlib import Path

OLDEST = {13: 580, 12: 525}
"""By CUDA's major version: the oldest driver on Linux."""
BUILDS = {13: "cu130", 12: "cu126"}
"""By CUDA's major version: a build of torch that PyTorch's index has."""
FROM_PYPI = "cu130"  # what PyPI has for Linux on x86-64, of the torch that requirements.lock pins
SAYS = Path("/proc/driver/nvidia/version")
QUERY = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def find_version(says: Path = SAYS) -> str | None:
    """Return the driver's version, such as `580.159.04`, from its module or nvidia-smi; or None."""
    try:
        text = says.read_text(errors="replace")
    except OSError:  # WSL has no such file
        if shutil.which(QUERY[0]) is None:
            return None
        done = subprocess.run(QUERY, capture_output=True, text=True, errors="replace")
        text = "" if done.returncode else done.stdout
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def fitting_build(driver: str | None) -> str:
    """Return the newest build of torch that a driver runs; `cpu` if there is none."""
    return next(
        (BUILDS[cuda] for cuda, oldest in OLDEST.items() if driver and _major(driver) >= oldest),
        "cpu",
    )


def oldest_driver(cuda: str) -> int:
    """Return the oldest driver for a CUDA version such as `13.0`; for a newer one the newest."""
    return OLDEST.get(_major(cuda), max(OLDEST.values()))


def needs(torch: str, cuda: str | None) -> str:
    """Return in words which driver this torch needs; empty for one that is built for no CUDA."""
    return f"torch {torch} needs {oldest_driver(cuda)} or newer" if cuda else ""


def why_no_gpu(torch: str, cuda: str | None, driver: str | None) -> str:
    """Return why this torch, for this CUDA or none, finds no GPU, and the command that mends it."""
    build, needed = fitting_build(driver), needs(torch, cuda)
    if driver is None:
        return "there is no NVIDIA driver" + (f", and {needed}" if needed else "")
    if build == "cpu":
        return (
            f"the NVIDIA driver is {driver}, and every build of torch needs {min(OLDEST.values())} "
            "or newer: update the driver"
        )
    if cuda is None:
        return (
            f"the NVIDIA driver is {driver}, and torch {torch} is built without CUDA: "
            f"make env TORCH={build}"
        )
    if _major(driver) < oldest_driver(cuda):
        return f"the NVIDIA driver is {driver}, and {needed}: make env TORCH={build}"
    return (
        f"the NVIDIA driver {driver} runs torch {torch}: look whether nvidia-smi lists a GPU, "
        "and CUDA_VISIBLE_DEVICES hides none"
    )


def _major(version: str) -> int:
    return int(version.split(".")[0])
