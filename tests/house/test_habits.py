"""Habits that a linter cannot hold."""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT
from tools import environment

NAME = 80  # characters; a test's name is shorter
LINES = 60  # of a function, from `def` to its end
PRODUCT = ("g2rpo_core", "stages", "studies", "flows", "pipeline", "benchmarks", "tools")
NOUN = 0.02  # share of the functions' docstrings that open with a noun or an article
OPENERS = re.compile("(the|a|an|what|how|which|whether|why|one|every|of|all|each) ")
# Folders of tests/
NOT_A_PACKAGE = {"docs", "fixtures", "goldens", "house", "package", "pipeline", "reliability"}


def functions(*folders: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below these folders with its file, methods and inner functions as well."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(path.relative_to(ROOT)), node


def test_the_name_of_a_test_has_fewer_than_80_characters():
    assert [
        node.name
        for _, node in functions("tests")
        if node.name.startswith("test_") and len(node.name) >= NAME
    ] == []


def test_no_function_is_longer_than_60_lines():
    lines = {
        f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in functions(*PRODUCT)
    }
    assert {name: count for name, count in lines.items() if count > LINES} == {}, (
        "too long: split it"
    )


def test_few_docstrings_open_with_a_noun():
    docstrings = [text for _, node in functions(*PRODUCT) if (text := ast.get_docstring(node))]
    assert sum(bool(OPENERS.match(text.lower())) for text in docstrings) <= NOUN * len(docstrings)


def test_tests_mirror_the_packages():
    packages = {path.parent.name for path in (ROOT / "g2rpo_core").glob("*/__init__.py")}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")} - NOT_A_PACKAGE
    assert packages <= folders
    assert folders - packages <= {"benchmarks", "examples", "flows", "stages", "studies", "tools"}


def test_every_file_that_names_the_version_names_the_same():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(
        r"^## \[([\d.]+)\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    cited = re.findall(
        r"^(?:version|date-released): (.+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert newest and newest[1] == version and cited == [newest[1], newest[2]]


def test_every_package_that_pyproject_asks_for_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {plain(name) for lock in environment.LOCKS for name, _, _ in pins(lock)}
    asked = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert {plain(re.match(r"[\w.-]+", each)[0]) for each in asked} <= pinned


def pins(lock: str) -> list[tuple[str, str, int]]:
    """Name, version and number of hashes of every entry of a lock."""
    text = re.sub(r"(?m)^ *#.*\n", "", (ROOT / lock).read_text()).replace("\\\n", " ")
    found = [
        (name, version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?= |$)", rest)))
        for name, version, rest in re.findall(r"(?m)^([\w.-]+)===?([^\s;]+)(.*)$", text)
    ]
    assert len(found) == len(text.splitlines())  # nothing else, such as a range or an address
    return found


@pytest.mark.parametrize("lock", [*environment.LOCKS, "requirements-tools.lock"])
def test_every_pin_of_a_lock_has_the_hashes_of_its_files(lock):
    assert [name for name, _, hashes in pins(lock) if not hashes] == []


def test_both_builds_of_torch_are_locked_at_the_same_versions():
    pypi, cpu = (
        {name: version.split("+")[0] for name, version, _ in pins(lock)}
        for lock in (environment.PYPI_TORCH, environment.CPU_TORCH)
    )
    assert cpu == {name: pypi[name] for name in ("torch", "torchvision")}


def test_what_workflows_take_from_elsewhere_is_named_by_a_commit():
    used = [
        line
        for path in (ROOT / ".github").rglob("*.yml")
        for line in path.read_text().splitlines()
        if re.search(r"\b(uses|image|container):", line)
    ]
    assert used and all(re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d", line) for line in used)


def plain(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    "message, good",
    [
        ("Let DVC restore trainings\n", True),
        ("Let DVC restore trainings\n\nIt ran them again, for hours.\n", True),
        ("Let DVC restore trainings\n# Please enter the commit message\n", True),
        (f"Say {'it ' * 30}at length\n", False),
        ("Let DVC restore trainings.\n", False),
        ("let DVC restore trainings\n", False),
        ("Let DVC restore trainings\nat once\n", False),
        ("Pass the device on\n", True),
        ("Need a token for gated weights\n", True),
        ("Fixed what was reported\n", False),
        ("Lock after that: every output has the hash that it had\n", False),
    ],
)
def test_the_hook_takes_a_short_imperative_subject(message, good):
    hooks = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    (pattern,) = (each["entry"] for each in hooks if each["id"] == "subject")
    assert bool(re.search(pattern, message, re.MULTILINE)) == good
