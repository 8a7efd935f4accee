"""What a colleague in a shared checkout may read and write: the umask decides, not a library."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

WRITES = """\
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from g2rpo_core.foundation.claims import one_at_a_time, take
from g2rpo_core.foundation.files import write_whole
from g2rpo_core.foundation.manifest import write_manifest
from g2rpo_core.foundation.permissions import share_weights

Path("made", "part").mkdir(parents=True)
save_file({"a": np.zeros(2)}, "made/part/weights.safetensors")
share_weights(Path("made"))
write_whole(Path("made/table.json"), "{}")
take("train", "run")
with one_at_a_time(Path("made/index.lock")):
    pass
write_manifest(Path("whole.json"), Path("made"))
"""


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_every_file_has_the_mode_that_the_umask_says(tmp_path, umask, mode):
    done = subprocess.run(
        [sys.executable, "-c", WRITES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        umask=umask,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5 and {path.stat().st_mode & 0o777 for path in files} == {mode}
