"""Each stage is read on one screen, however wide its lines are."""

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT
from tests.fixtures.statements import statements

COMMANDS = [
    entry["cmd"]
    for entry in YAML(typ="safe", pure=True)
    .load((ROOT / "dvc.yaml").read_text())["stages"]
    .values()
]
STAGES = sorted({command.partition("python -m stages.")[2].split()[0] for command in COMMANDS})


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_at_most_80_statements(stage):
    assert statements(ROOT / "stages" / f"{stage}.py") <= 80
