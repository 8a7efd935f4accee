"""What a colleague in a shared checkout may read and write: the umask decides, not a library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

COLLEAGUE, GROUP = 65534, 54321  # nobody, in a group of ours
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


def run(code: str, folder: Path, umask: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        umask=umask,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_every_file_has_the_mode_that_the_umask_says(tmp_path, umask, mode):
    done = run(WRITES, tmp_path, umask)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5 and {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_models_and_weights_have_the_mode_of_their_folders(models, policy, tmp_path):
    policy.save(tmp_path / "out")
    for folder in (models, tmp_path / "out"):
        weights = [path for path in folder.rglob("*") if path.is_file()]
        assert any(path.suffix == ".safetensors" for path in weights)
        for path in weights:
            assert path.stat().st_mode & 0o666 == path.parent.stat().st_mode & 0o666, path


BECOMES = """\
import os
from pathlib import Path
from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.files import read_json
from g2rpo_core.foundation.manifest import find_whole
os.setgroups([]), os.setgid({group}), os.setuid({user})
"""  # once all is imported: Python itself may be in a folder of root's


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_colleague_of_the_group_reads_and_locks_with_a_umask_of_two(tmp_path):
    above = [(path, path.stat().st_mode) for path in tmp_path.parents]
    above = [(path, mode) for path, mode in above if not mode & 0o001]  # pytest's own
    os.chown(tmp_path, 0, GROUP)
    tmp_path.chmod(0o2771)  # as a shared checkout is: new files get its group
    try:
        for path, mode in above:
            path.chmod(mode & 0o7777 | 0o001)
        assert run(WRITES, tmp_path, 0o002).returncode == 0
        code = BECOMES.format(user=COLLEAGUE, group=GROUP)
        code += 'take("train", "run"); Path("made/part/weights.safetensors").read_bytes()\n'
        code += 'print(read_json(Path("made/table.json")), os.getuid())'
        done = run(code, tmp_path, 0o002)
        assert (done.returncode, done.stdout) == (0, f"{{}} {COLLEAGUE}\n"), done.stderr
        # Without the group: whose it is, and not how to make it again
        (tmp_path / "made").chmod(0o700)
        for call in (
            "read_json(Path('made/table.json'))",
            "find_whole(Path('whole.json'), Path('made'))",
        ):
            done = run(BECOMES.format(user=COLLEAGUE, group=COLLEAGUE) + call, tmp_path, 0o002)
            assert done.stderr.splitlines()[-1].endswith(
                ": cannot be read (Permission denied); "
                f"root can let you read {tmp_path / 'made'}, with chmod -R g+rX or a umask of 0002"
            )
    finally:
        for path, mode in above:
            path.chmod(mode & 0o7777)
