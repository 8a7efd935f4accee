"""Each stage is read on one screen, however wide its lines are."""

import ast

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT

COMMANDS = [
    entry["cmd"]
    for entry in YAML(typ="safe", pure=True)
    .load((ROOT / "dvc.yaml").read_text())["stages"]
    .values()
]
STAGES = sorted({command.partition("python -m stages.")[2].split()[0] for command in COMMANDS})
FILES = sorted(file for room in ("stages", "pipeline") for file in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_at_most_80_statements(stage):
    nodes = ast.walk(ast.parse((ROOT / "stages" / f"{stage}.py").read_text()))
    assert sum(isinstance(node, ast.stmt) for node in nodes) <= 80


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_function_of_stages_and_pipeline_has_more_than_60_lines(file):
    functions = [
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert [node.name for node in functions if node.end_lineno - node.lineno >= 60] == []
