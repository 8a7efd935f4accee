"""Build and load `stub.cpp`: CUDA's hooks and device guard that do nothing.

It serves a CPU build of torch and a CUDA build. A process loads it before it imports torch, because
torch asks for the hooks once and keeps them; importing this module loads nothing.
"""

import ctypes
import importlib.metadata
import shutil
import subprocess
import tempfile
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import reason

# After the last of these, because a CUDA build registers hooks and a guard of its own: the stub's
# hooks go before them by their priority, and of two guards the last one counts.
BEFORE = ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so")


def load() -> None:
    """Compile the library for this torch, and load it after the parts that it stands in for.

    UserError without a compiler.
    """
    if shutil.which("g++") is None:
        raise UserError(
            "rehearse needs a C++ compiler: install g++ (Debian: apt install g++), "
            "then the same again"
        )
    home = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    paths = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-L{home}/lib"]
    source = Path(__file__).with_name("stub.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "stub.so")
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(source), *paths]
        done = subprocess.run(
            [*command, f"-o{library}", "-lc10", "-ltorch_cpu"],
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise UserError(
                f"rehearse: g++ cannot compile stub.cpp, which needs C++20: {reason(done.stderr)}"
            )
        for name in BEFORE:
            if (home / "lib" / name).exists():  # a CPU build has no libtorch_cuda
                mode = ctypes.RTLD_GLOBAL if name == BEFORE[0] else ctypes.DEFAULT_MODE
                ctypes.CDLL(str(home / "lib" / name), mode=mode)
        ctypes.CDLL(str(library))
