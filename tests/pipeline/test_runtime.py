"""Seams between product and rehearsal: declared in `Runtime`, used here and replaced there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUNTIME = ROOT / "g2rpo_core" / "distributed" / "runtime.py"
REHEARSAL = sorted((ROOT / "pipeline" / "rehearsal").glob("*.py"))
OURS = ("g2rpo_core", "stages", "pipeline")
PRODUCT = [
    file
    for room in ("g2rpo_core", "stages")
    for file in (ROOT / room).rglob("*.py")
    if file != RUNTIME
]


def seams_of(file: Path, name: str) -> set[str]:
    """The public methods that a class itself defines, or assigns."""
    (found,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    defined = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    assigned = {
        ast.unparse(target)
        for node in found.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    return {each for each in defined | assigned if not each.startswith("_")}


def product() -> Iterator[ast.AST]:
    for file in PRODUCT:
        yield from ast.walk(ast.parse(file.read_text()))


def is_seam(node: ast.AST) -> bool:
    """Whether this is an attribute of `runtime`, or of something's runtime."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "runtime"


def test_the_product_uses_every_seam_and_the_rehearsal_replaces_it():
    seams = seams_of(RUNTIME, "Runtime")
    assert {node.attr for node in product() if is_seam(node)} == seams
    assert seams_of(ROOT / "pipeline" / "rehearsal" / "runtime.py", "Rehearsed") >= seams


def test_every_function_that_reads_weights_has_a_stand_in():
    calls = [node for node in product() if isinstance(node, ast.Call) and is_seam(node.func)]
    read = {ast.unparse(call.args[0]) for call in calls if call.func.attr == "read"}
    source = ast.parse((ROOT / "pipeline" / "rehearsal" / "runtime.py").read_text())
    assigned = [node for node in ast.walk(source) if isinstance(node, ast.AnnAssign)]
    (stand_ins,) = (
        node.value for node in assigned if ast.unparse(node.target) == "self._stand_ins"
    )
    assert {key.attr for key in stand_ins.keys} == read


def patched(source: str) -> list[str]:
    """The attributes of this project's modules and classes that a file's code assigns."""
    tree = ast.parse(source)
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                whole = (
                    f"{node.module}.{alias.name}"
                    if isinstance(node, ast.ImportFrom)
                    else alias.name
                )
                if whole.startswith(OURS):
                    ours.add(
                        alias.asname
                        or (
                            alias.name
                            if isinstance(node, ast.ImportFrom)
                            else alias.name.split(".")[0]
                        )
                    )
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets += [part for target in node.targets for part in ast.walk(target)]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets.append(node.target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("setattr", "patch.object")
        ):
            targets.append(ast.Attribute(node.args[0], ast.unparse(node.args[1])))
    found = [target for target in targets if isinstance(target, ast.Attribute)]
    return [ast.unparse(target) for target in found if ast.unparse(target).split(".")[0] in ours]


@pytest.mark.parametrize("file", REHEARSAL, ids=lambda file: file.stem)
def test_a_rehearsal_patches_none_of_the_projects_own_code(file):
    assert not patched(file.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "policy.Policy.load = None",
        "stages.train.main = None",
        "policy.a = train.b = None",
        "setattr(policy, 'load', None)",
        "del policy.load",
        "policy.count += 1",
    ],
)
def test_a_patch_of_the_projects_own_code_is_found(line):
    assert patched(f"import stages.train\nfrom g2rpo_core.models import policy\n{line}\n")
