"""How far each profile was tried is on its first line, and in the table of plan.md."""

import re
from itertools import zip_longest

import pytest

from g2rpo_core.config import load_profile
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import make_plan
from tests.conftest import ROOT
from tools.reference import hours_table

MEMORY = {"141": 139, "80": 79, "24": 23}  # GiB of a card, by what it is sold as
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


def test_the_readmes_hours_are_the_planners():
    assert hours_table() in (ROOT / "README.md").read_text(), "run: python -m tools.reference hours"


def test_the_hours_of_the_table_of_profiles_are_the_planners():
    """On the hardware of each row, at the assumed rate."""
    page = (ROOT / "docs" / "howto" / "plan.md").read_text()
    hardware = r"(?:(\d+) × )?(\d+) GPUs? of (\d+) GB"
    found = re.findall(rf"^\| (`.*`).*? \| .* \| {hardware} \| (.*) \|$", page, re.MULTILINE)
    told = {
        name: (int(nodes or 1), int(nodes or 1) * int(gpus), MEMORY[size], hours)
        for names, nodes, gpus, size, cell in found
        for name, hours in zip_longest(
            re.findall(r"`(\w+)`", names), hours_in(cell), fillvalue=(hours_in(cell) or [None])[0]
        )
    }
    assert len(told) >= 17 and [name for name, row in told.items() if row[3] is None] == [
        "flux_smoke"  # half a minute
    ]
    for name, (nodes, gpus, memory, hours) in told.items():
        profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
        plan = make_plan(profile, "g2rpo", Machines(gpus, memory, nodes))
        assert plan.fits
        if hours is not None:
            # As many digits as are printed
            assert abs(plan.hours - float(hours)) <= (0.05 if "." in hours else 0.5) + 0.01, name


def hours_in(cell: str) -> list[str]:
    """The hours that a cell begins with: of each of its profiles, or of all."""
    said = re.match(r"([\d.]+)(?: and ([\d.]+))? hours", cell)
    return [each for each in said.groups() if each] if said else []
