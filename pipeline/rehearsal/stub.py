"""Build and load `stub.cpp`: CUDA's hooks and device guard that do nothing.

It serves a CPU build of torch and a CUDA build.

A process loads it before it imports torch, because torch asks for the hooks once and keeps them;
importing this module loads nothing.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

from g2rpo_core.foundation.errors import UserError

SOURCE = Path(__file__).with_name("stub.cpp")
# After the last of these, because a CUDA build registers hooks and a guard of its own: the stub's
# hooks go before them by their priority, and of two guards the last one counts.
BEFORE = ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so")


def build(folder: Path) -> Path:
    """Return the library for this torch in `folder`, compiled if missing, or raise UserError."""
    torch = importlib.metadata.distribution("torch")
    home = str(torch.locate_file("torch"))
    name = hashlib.sha256(SOURCE.read_bytes() + f"{home} {torch.version}".encode()).hexdigest()[:16]
    library = folder / f"stub-{name}.so"
    if library.exists():
        return library
    if shutil.which("g++") is None:
        raise UserError(
            "rehearse needs a C++ compiler: install g++ (Debian: apt install g++), "
            "then the same again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"stub-{os.getpid()}.new"
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        str(SOURCE),
        "-o",
        str(made),
        *include,
    ]
    done = subprocess.run(
        [*command, f"-L{home}/lib", "-lc10", "-ltorch_cpu"], capture_output=True, text=True
    )
    if done.returncode:
        why = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            f"status {done.returncode}",
        )
        raise UserError(f"rehearse: g++ cannot compile {SOURCE.name}, which needs C++20: {why}")
    made.rename(library)
    return library


def load(library: Path) -> None:
    """Load the library that `build` returned, after the parts of torch that it stands in for."""
    home = Path(str(importlib.metadata.distribution("torch").locate_file("torch")), "lib")
    for name in BEFORE:
        if (home / name).exists():  # a CPU build has no libtorch_cuda
            ctypes.CDLL(
                str(home / name),
                mode=ctypes.RTLD_GLOBAL if name == BEFORE[0] else ctypes.DEFAULT_MODE,
            )
    ctypes.CDLL(str(library.resolve()))
