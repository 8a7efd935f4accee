"""The rules that the Dockerfile keeps; it is read and not built."""

import re
import shutil
import subprocess
import sys

import pytest

from g2rpo_core.numerics import driver
from tests.conftest import ROOT
from tools import environment


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Its instructions and their words, each in one line."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    return [
        (name, " ".join(words.split())) for name, words in re.findall(r"(?m)^([A-Z]+) (.+)$", text)
    ]


def test_the_base_is_an_argument_whose_default_is_one_release_by_its_digest(steps):
    assert [words for name, words in steps if name == "FROM"] == ["${BASE}"]
    base = r"BASE=python:3\.11\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}"
    assert re.fullmatch(base, steps[0][1]) and steps[0][0] == "ARG"


def test_the_packages_are_the_locks_and_come_before_the_code(steps, tmp_path):
    copies = [number for number, (name, words) in enumerate(steps) if name == "COPY"]
    code = next(number for number in copies if steps[number][1].endswith(" . ."))
    (install,) = (
        number
        for number, (name, words) in enumerate(steps)
        if name == "RUN" and words.endswith("python3 -m tools.environment install /opt/g2rpo")
    )
    assert max(copies[:-1]) < install < code == copies[-1]
    asked = [each for _, words in steps for each in re.findall(r"pip install (.+?)(?=&&|$)", words)]
    assert asked == ["--no-deps --no-build-isolation --editable ."]
    assert ("ARG", f"TORCH={driver.FROM_PYPI}") in steps
    # What that command imports and reads is there
    for number in copies[:-1]:
        *sources, folder = steps[number][1].split()[1:]
        for path in (path for source in sources for path in ROOT.glob(source)):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / folder)
    command = [sys.executable, "-m", "tools.environment", "check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "error: there is no environment; build it with: make env\n"
    files = (*environment.LOCKS, *environment.FITTINGS)
    assert all((tmp_path / name).is_file() for name in files)


def test_nothing_runs_as_root_once_the_system_is_set_up(steps):
    users = [number for number, (name, _) in enumerate(steps) if name == "USER"]
    assert [steps[number][1] for number in users] == ["${UID}"] and ("ARG", "UID=1000") in steps
    assert [name for name, _ in steps[: users[0]]] == ["ARG", "FROM", "ARG", "RUN"] and steps[-1][
        0
    ] == "CMD"
    assert all("--chown=${UID}" in words for name, words in steps if name == "COPY")


def test_no_secret_and_nothing_that_git_ignores_gets_into_the_image(steps):
    assert not [
        words
        for name, words in steps
        if name == "ADD" or re.search(r"(?i)token|secret|passw(?!d)|_key", words)
    ]
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    kept_out = [line if line.startswith(("/", "!")) else f"**/{line}" for line in ignored]
    assert (ROOT / ".dockerignore").read_text().splitlines() == [*kept_out, "/.git"]
