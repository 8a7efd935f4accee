"""Makes a CUDA-built torchvision importable beside a CPU-only torch; run once by `make .venv`.

The registry's torchvision expects two compiled operators that a CPU-only torch does not load, and
its import ends with `operator torchvision::nms does not exist`, which also breaks transformers'
CLIP and open_clip. In that case, this file copies itself into the environment as a module that is
imported at every start of Python (by a .pth file) and declares the two operators just before
torchvision is imported. Nothing here calls them: they are detection ops.
"""

import importlib.abc
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = "_torchvision_without_cuda"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Run once at torchvision's first import, and leave the search to the finders after it."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "DEF")
                self.library.define(
                    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
                self.library.define(
                    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
                sys._torchvision_without_cuda = (
                    self  # the operators live as long as the library object
                )


def main() -> None:
    trial = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True
    )
    if trial.returncode == 0:
        return
    if "torchvision::nms" not in trial.stderr:
        sys.exit(f"torchvision cannot be imported:\n{trial.stderr}")
    site = Path(sysconfig.get_paths()["purelib"])
    shutil.copy(__file__, site / f"{MODULE}.py")
    (site / f"{MODULE}.pth").write_text(f"import {MODULE}\n")
    subprocess.run([sys.executable, "-c", "import torchvision"], check=True)
    print("torchvision was built for CUDA and torch was not: declared the two operators it misses")


if __name__ == "__main__":
    main()
else:
    sys.meta_path.insert(0, _DeclareOperators())
