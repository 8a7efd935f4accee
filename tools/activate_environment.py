"""Makes every program of the environment behave as if it had been activated; run once by `make`.

DVC runs stages in a shell, whose `python` is the first on PATH: without this, `.venv/bin/dvc repro`
from a shell in which the environment is not active would remove a stage's outputs and then run it
in another Python. A .pth file runs at every start of this environment's Python, so the
environment's programs come first for whatever it starts.
"""

import sysconfig
from pathlib import Path

NAME = "_environment_first_on_path"
CODE = """\
import os
import sys

_programs = os.path.join(sys.prefix, "bin")
_path = os.environ.get("PATH", os.defpath)
if _path.split(os.pathsep)[0] != _programs:
    os.environ["PATH"] = _programs + os.pathsep + _path
"""


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    (site / f"{NAME}.py").write_text(CODE)
    (site / f"{NAME}.pth").write_text(f"import {NAME}\n")


if __name__ == "__main__":
    main()
