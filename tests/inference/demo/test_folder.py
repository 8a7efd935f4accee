"""Where the page keeps its pictures."""

import os
import subprocess
import sys
from pathlib import Path


def imported(folder: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import os, g2rpo_core.inference.demo; home = os.environ['GRADIO_TEMP_DIR']; "
        "print(home, os.path.isdir(home))"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"GRADIO_TEMP_DIR": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_folder_of_pictures_that_is_missing_is_made(tmp_path):
    folder, there = imported(tmp_path / "new" / "folder").stdout.split()
    assert Path(folder).parent == tmp_path / "new" / "folder" and there == "True"
    assert [*Path(folder).parent.iterdir()] == []  # and what was put into it is removed


def test_a_folder_of_pictures_that_cannot_be_made_is_named():
    done = imported(Path("/dev/null"))
    assert done.stderr.splitlines()[-1].endswith(
        "GRADIO_TEMP_DIR=/dev/null: cannot be written (File exists): name another folder"
    )
