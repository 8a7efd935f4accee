"""The rules that the Dockerfile keeps; it is read and not built."""

import re

import pytest

from g2rpo_core.numerics import driver
from tests.conftest import ROOT
from tools.environment import TORCH_INDEX


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Its instructions and their words, each in one line."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    return [
        (name, " ".join(words.split())) for name, words in re.findall(r"(?m)^([A-Z]+) (.+)$", text)
    ]


def test_the_base_is_an_argument_whose_default_is_one_release(steps):
    assert [words for name, words in steps if name == "FROM"] == ["${BASE}"]
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-[a-z]+", steps[0][1]) and steps[0][0] == "ARG"


def test_the_packages_are_the_locks_and_come_before_the_code(steps):
    copies = [number for number, (name, words) in enumerate(steps) if name == "COPY"]
    code = next(number for number in copies if steps[number][1].endswith(" . ."))
    installs = [
        number
        for number, (name, words) in enumerate(steps)
        if name == "RUN" and "--requirement requirements.lock" in words
    ]
    assert (
        any("requirements.lock" in steps[number][1] for number in copies if number < installs[0])
        and installs[0] < code
    )
    allowed = (
        "--requirement requirements.lock",
        (
            '"$(grep ^torch== requirements.lock)+${TORCH}" "$(grep ^torchvision== '
            'requirements.lock)" '
            "--extra-index-url https://download.pytorch.org/whl/${TORCH}"
        ),
        "--no-deps --no-build-isolation --editable .",
    )
    asked = [
        asked.strip()
        for name, words in steps
        for asked in re.findall(r"pip install (.+?)(?=&&|$)", words)
    ]
    assert len(asked) == 3 and set(asked) == set(allowed)
    assert ("ARG", f"TORCH={driver.FROM_PYPI}") in steps and TORCH_INDEX.format(
        build="${TORCH}"
    ) in allowed[1]
    for number in copies[:-1]:
        for source in steps[number][1].split()[1:-1]:
            assert (ROOT / source).is_file(), source


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
