"""How far each profile was tried is on its first line, and in the table of plan.md."""

import re

import pytest

from tests.conftest import ROOT

LEVELS = ("run on a GPU", "run on a CPU", "rehearsed", "planned")
PROFILES = {
    path.stem: path.read_text().splitlines() for path in sorted((ROOT / "profiles").glob("*.yaml"))
}


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


def test_the_table_has_every_profile_and_says_the_same():
    page = (ROOT / "docs" / "howto" / "plan.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| (.*) \|$", page, re.MULTILINE)
    cells = {name: cell for names, cell in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(cells) == set(PROFILES)
    assert {name: level for name, cell in cells.items() for level in LEVELS if level in cell} == {
        name: level_of(name) for name in PROFILES
    }


def test_no_other_document_has_a_table_of_profiles():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        rows = re.findall(r"^\| `(\w+)`.* \|$", path.read_text(), re.MULTILINE)
        assert path.name == "plan.md" or len(set(rows) & set(PROFILES)) < 4, (
            path
        )  # fewer are a table of something else
