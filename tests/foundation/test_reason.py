"""Why a program failed, by what it wrote."""

import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo_core.foundation.texts import reason


@pytest.mark.parametrize(
    ("wrote", "why"),
    [
        ("ERROR: no x - ~\n\nHaving any troubles? Hit us up!\n", "no x - ~"),
        ("Having any troubles? Hit us up!\n", "it wrote nothing"),
        ("Traceback (most recent call last):\nValueError: 7\n\n", "ValueError: 7"),
        ("error: one\nerror: another\nmake: *** [x] Error 1\n", "another"),
        ("fatal: not a repository\nhint: git init\n", "not a repository"),
        ("errors are many\n", "errors are many"),
        ("ERROR: \x1b[31mred\n", r"\x1b[31mred"),
        ("", "it wrote nothing"),
    ],
)
def test_the_reason_is_the_last_line_that_says_one(wrote, why):
    assert reason(wrote) == why


@pytest.mark.pipeline
def test_the_reason_of_a_failing_dvc_is_not_its_advertisement(tmp_path):
    def dvc(*words: str) -> str:
        command = [sys.executable, "-m", "dvc", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr

    dvc("init", "--no-scm", "--quiet")
    (tmp_path / "dvc.yaml").write_text("stages: {made: {cmd: echo, outs: [out]}}\n")
    (tmp_path / "out").write_text("x")
    cache = Path(tmp_path, ".dvc", "cache")
    cache.write_text("no folder")
    said = dvc("commit", "--force", "made")
    assert "Having any troubles?" in said.strip().splitlines()[-1]
    assert "Not a directory" in reason(said) and str(cache) in reason(said)
