"""How far each profile was tried stands on its first line, and in the tables of README and plan.md."""

import re

import pytest

from tests.conftest import ROOT

LEVELS = ("run on a GPU", "run on a CPU", "rehearsed", "planned")
PROFILES = {path.stem: path.read_text().splitlines() for path in sorted((ROOT / "profiles").glob("*.yaml"))}


def level_of(name: str) -> str:
    return PROFILES[name][0].removeprefix("# [").removesuffix("]")


@pytest.mark.parametrize("name", PROFILES)
def test_the_first_line_of_a_profile_says_how_far_it_was_tried(name):
    assert PROFILES[name][0] == f"# [{level_of(name)}]" and level_of(name) in LEVELS
    about = " ".join(line.removeprefix("#") for line in PROFILES[name][:12] if line.startswith("#"))
    if "not rehearsed" in " ".join(about.split()):
        assert level_of(name) == "planned"
    if level_of(name) == "rehearsed":
        assert "Run on" not in about


@pytest.mark.parametrize("file", ["README.md", "docs/howto/plan.md"])
def test_the_tables_say_the_same(file):
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| (.*) \|$", (ROOT / file).read_text(), re.MULTILINE)
    known = {name: cell for names, cell in rows for name in re.findall(r"`(\w+)`", names) if name in PROFILES}
    assert len(known) >= 10
    for name, cell in known.items():
        assert (level_of(name) == "planned") == ("planned" in cell or "not rehearsed" in cell), (name, cell)
