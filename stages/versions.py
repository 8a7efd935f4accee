"""The version of each stage's code: equal for code that computes the same bits.

A version is the hash of the first code that computed them, so that no two share a name: `make
vouch` compares bits and writes versions.yaml. Code that is not in there is its own version.
"""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import files_in, read_yaml
from g2rpo_core.foundation.runs import CODE

ROOT = Path(__file__).parents[1]
VOUCHED = Path(__file__).with_suffix(".yaml")
STAGES = ("profile", "models", "prompts", "embed", "train", "evaluate", "published", "report")
# Executed by stages and deciding no output: what shows, tells, reserves, commits and names code
SILENT = (
    "g2rpo_core/tracking",
    "g2rpo_core/distributed/accelerate",
    *map("g2rpo_core/foundation/{}.py".format, ("claims", "layout", "permissions", "progress")),
    *map("stages/{}.py".format, ("dvc", "start", "versions")),
)
# It imports the settings of all packages to check profiles; a stage has those that it imports too,
# and the others of its sections
CONFIG, BELOW = "g2rpo_core/config", ("g2rpo_core/config", "g2rpo_core/foundation")
SETTINGS = {
    "embed": ("data",),
    "report": ("data", "hub", "tiny_models"),
}
# Calls and arguments whose texts only people read, and modules that hints of types are from
TELLING = ("TransientError", "UserError", "complaint", "echo", "print", "say", "warn")
HELP = ("desc", "description", "help")
HINTS = ("collections.abc", "types", "typing")
NAME = re.compile(r"\w[\w./-]{0,80}")
UNTOLD = ("ctx", "kind", "type_comment")  # of a syntax tree


def versions() -> dict[str, str]:
    """Return the version of each stage's code."""
    return {stage: version_of(stage) for stage in STAGES}


def version_of(stage: str) -> str:
    """Return the version of a stage's code as it is on disk."""
    code, vouched = hash_of(stage), read_yaml(VOUCHED).get(stage, {})
    return vouched["version"] if code == vouched.get("code") else code


def code_of(stage: str) -> dict[str, str]:
    """Return the version of a stage's code, as this process began with it, as a setting."""
    return {CODE: _begun_with(stage, ROOT)}


@cache
def _begun_with(stage: str, root: Path) -> str:
    return version_of(stage)


def is_begun_with(stage: str) -> bool:
    """Tell whether a stage's code, such as that of `train@g2rpo-1`, is as this process began."""
    return version_of(module_of(stage)) == _begun_with(module_of(stage), ROOT)


def module_of(stage: str) -> str:
    """Return the module of a stage of dvc.yaml: evaluate_base is of evaluate."""
    return stage.rpartition(":")[2].partition("@")[0].partition("_")[0]


def hash_of(stage: str) -> str:
    """Return the hash of all that a stage imports from this repository, and of what that reads.

    That is the syntax, without comments, docstrings, hints of types and texts for people. Fields of
    classes keep their types, which pydantic and dataclasses execute.
    """
    contents = hashlib.sha256()
    for file in files_of(stage):
        text = file.read_bytes()
        told = _syntax(file, text)[0] if file.suffix == ".py" else text
        contents.update(f"{file.relative_to(ROOT)}\n{hashlib.sha256(told).hexdigest()}\n".encode())
    return f"v{contents.hexdigest()[:10]}"


def files_of(stage: str) -> list[Path]:
    """Return the Python files that a stage imports, at any time, and the files that these name."""
    found: set[Path] = set()
    todo = [ROOT / "g2rpo_core" / room / "settings.py" for room in SETTINGS.get(stage, ())]
    todo.append(ROOT / "stages" / f"{stage}.py")
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found.add(file)
        if file.suffix == ".py":
            todo += _needs(file)
    return sorted(found)


def check_recorded(profile: Path) -> None:
    """Take the version of the stage of this process before it loads anything.

    UserError if DVC started it and would record another one: that of the resolved profile.
    """
    began = getattr(sys.modules["__main__"], "__spec__", None)
    name = os.environ.get("DVC_STAGE") or (began.name.removeprefix("stages.") if began else "")
    if (stage := module_of(name)) not in STAGES:
        return
    version = _begun_with(stage, ROOT)
    known = read_yaml(profile).get("code", {}) if profile.exists() else {}
    if "DVC_STAGE" in os.environ and known.get(stage, version) != version:
        raise UserError(
            f"{profile}: the code of {name} has changed since this was written: "
            f"dvc repro {name}, which brings both up to date"
        )


def _needs(file: Path) -> Iterator[Path]:
    """Yield the files that a Python file imports or names, but for those that decide nothing."""
    _, modules, texts = _syntax(file, file.read_bytes())
    inside = file.is_relative_to(ROOT / CONFIG)
    for module in modules | texts:
        parts = module.split(".")
        for last in range(1, len(parts) + 1) if parts[0] in ("g2rpo_core", "stages") else ():
            path = ROOT.joinpath(*parts[:last])
            for found in (path.with_suffix(".py"), path / "__init__.py"):
                place = str(found.relative_to(ROOT))
                decides = place.startswith(BELOW if inside else "") and not place.startswith(SILENT)
                if decides and found.is_file():
                    yield found
    for named in (file.parent / text for text in texts):
        if str(named.relative_to(ROOT)).startswith(SILENT) or "__pycache__" in named.parts:
            continue
        if named.is_dir() and not (named / "__init__.py").exists():  # without editors' files
            yield from (named / name for name in files_in(named))
        elif named.is_file() and named.suffix != ".py":
            yield named


@cache
def _syntax(file: Path, source: bytes) -> tuple[bytes, frozenset[str], frozenset[str]]:
    """Return the syntax that decides outputs, the modules that it imports, and texts like names."""
    try:
        tree = Deciding().visit(ast.parse(source))
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte, before Python 3.12
        where = f"{file}:{getattr(error, 'lineno', None) or 1}"
        raise UserError(f"{where}: this is no Python: {getattr(error, 'msg', error)}") from None
    modules, texts = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = file.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join(filter(None, (*above, node.module)))
            modules |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
            texts.add(str(node.value))
    return told(tree).encode(), frozenset(modules), frozenset(texts)


def told(node: object) -> str:
    """Return a syntax tree as a text that is the same in every version of Python."""
    if isinstance(node, list):
        return "".join(map(told, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 alone puts empty texts into some
        node.values = [each for each in node.values if getattr(each, "value", None) != ""]
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in ([], None)]
    inside = "".join(f" {name}={told(value)}" for name, value in fields if name not in UNTOLD)
    return f"({type(node).__name__}{inside})"


class Deciding(ast.NodeTransformer):
    """Removes docstrings, hints of types, imports for hints alone, and texts for people."""

    fields: tuple[ast.stmt, ...] = ()

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in HINTS else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if typing else node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.fields += tuple(node.body)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node in self.fields:
            return node
        return ast.Assign([node.target], node.value) if node.value else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg in HELP:
            self._mute(node.value)
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            self._mute(*node.exc.args)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if getattr(node.func, "id", getattr(node.func, "attr", None)) in TELLING:
            self._mute(*node.args)
        return self.generic_visit(node)

    def _mute(self, *nodes: ast.AST) -> None:
        """Empty texts, and those that are put together or chosen, but none that is a key."""
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
            elif isinstance(node, ast.JoinedStr | ast.BinOp | ast.IfExp):
                self._mute(*ast.iter_child_nodes(node))
