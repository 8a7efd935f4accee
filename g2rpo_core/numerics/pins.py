"""Pins the instructions that numpy and torch compute with, by environment variables.

They act if they are set before both are imported. Libraries choose their code by processor, and the
order of sums with it. These pins leave one choice for all processors with AVX2.
"""

import os
import platform
from pathlib import Path
from typing import Literal

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.profiles import profile_path, read_chain

Numerics = Literal["portable", "native", "deterministic"]
PINS = {
    # of torch's own kernels
    "ATEN_CPU_CAPABILITY": "avx2",
    # of MKL: any other value keeps one path for Intel's processors and another for those of others
    "MKL_CBWR": "COMPATIBLE",
    # of convolutions
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    # of numpy's matrix products
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    # of numpy's functions; unknown names do nothing
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    # sums of several threads are in another order
    "OMP_NUM_THREADS": "1",
}
NEEDED = ("avx2", "fma")  # as the kernel names them


def pin_profile(name: str | None) -> None:
    """Set the pins if the profile asks for portable numerics and this processor can.

    Silent on a profile that cannot be read. name: by default the profile of params.yaml. To be
    called before numpy and torch are imported.
    """
    try:
        profile = name or read_chain(Path("params.yaml")).data.get("profile")
        asked = read_chain(profile_path(str(profile))).data.get("numerics")
    except UserError:
        # whatever loads the profile next explains it
        return
    if asked == "portable" and not processor_problem():
        os.environ.update(PINS)


def are_set() -> bool:
    """Say whether all pins are in the environment."""
    return all(os.environ.get(name) == value for name, value in PINS.items())


def processor_problem() -> str | None:
    """Say why this processor cannot compute portable numerics; None if it can."""
    kind = platform.machine()
    if kind.lower() not in ("x86_64", "amd64"):
        return f"needs an x86-64 processor (this is {kind})"
    flags = read_processor().get("flags", "").split()
    if lacking := [flag for flag in NEEDED if flag not in flags]:
        return (
            "needs a processor with AVX2 and FMA (this one is not known to have "
            f"{' and '.join(lacking)})"
        )
    return None


def read_processor(file: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what Linux says of the first processor, by its names; empty on other systems."""
    if not file.exists():
        return {}
    first = file.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
