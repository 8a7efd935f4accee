"""Texts of the documents that quote the code."""

import importlib
import re
import tomllib

from tests.conftest import ROOT

DRAWN = re.compile(
    r"<!-- layers of pyproject\.toml -->\n\n```\n(.*?)```\n\n<!-- end of layers -->", re.DOTALL
)


def layers_of_contracts() -> list[str]:
    """Return the lines of both layers contracts, the core's own in the place below g2rpo_core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    within, around = (one["layers"] for one in contracts if one["type"] == "layers")
    return [*around, *(layer.replace("g2rpo_core.", "") for layer in within)]


def layers_of_drawing() -> list[str]:
    """Return the first column of CONTRIBUTING's drawing: what stands before two or more spaces."""
    (drawing,) = DRAWN.findall((ROOT / "CONTRIBUTING.md").read_text())
    return [re.split(r"\s{2,}", line.strip())[0] for line in drawing.splitlines()]


def test_the_architecture_on_one_screen_is_that_of_the_contracts():
    drawn, meant = (
        [set(layer.split(" | ")) for layer in layers]
        for layers in (layers_of_drawing(), layers_of_contracts())
    )
    assert drawn == meant


def test_every_package_of_the_core_is_in_the_folders_of_the_architecture():
    document = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "g2rpo_core").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", document, re.MULTILINE)) == packages


def test_the_line_of_an_interrupted_run_is_the_one_that_training_prints():
    shown = re.search(
        r"^g2rpo-1: (stopped .*)$",
        (ROOT / "docs" / "howto" / "interrupt.md").read_text(),
        re.MULTILINE,
    )
    printed = re.search(r'f"\{name\}: (stopped [^"]*)"', (ROOT / "stages" / "train.py").read_text())
    assert shown and printed
    assert shown[1] == re.sub(r"\{[^}]*\}", "57", printed[1])


def test_every_function_that_the_equations_name_exists():
    page = (ROOT / "docs" / "reference" / "papers.md").read_text().split("## Equations")[1]
    named = re.findall(r"`((?:algorithm|sampling|training|models)\.\w+\.[\w.]+)`", page)
    assert len(named) > 20
    for name in named:
        package, module, *attributes = name.split(".")
        found = importlib.import_module(f"g2rpo_core.{package}.{module}")
        for attribute in attributes:
            found = getattr(found, attribute)
