"""Which of the project's code a stage imports, directly or not: what it must declare to DVC.

A package is declared as a folder, whichever of its files is imported; a module of stages/ as a
file.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("g2rpo_core", "stages")
# Puts together what the stages declare as parameters: a dependency of the stage `profile` alone,
# which writes these.
CONFIG = "g2rpo_core/config"
# In no stage's dependencies: how a mistake is told, and what all stages do alike.
NOT_FOLLOWED = {
    "g2rpo_core/__init__.py",
    "g2rpo_core/foundation",
    "stages/__init__.py",
    "stages/dvc.py",
    "stages/entry.py",
    "stages/paths.py",
    "stages/start.py",
}


def module_file(name: str) -> Path | None:
    path = ROOT / Path(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imports(file: Path) -> set[Path]:
    """The project's files that `file` imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {module_file(name) for name in names if name.split(".")[0] in PACKAGES} - {None}


def unit(file: Path) -> str:
    """What is declared for a file: its package's folder, or a module of stages/ itself."""
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[:2])


def closure(stage: str) -> list[str]:
    """The packages and modules that `stages.<stage>` needs, sorted."""
    todo, seen = [ROOT / "stages" / f"{stage}.py"], set()
    while todo:
        file = todo.pop()
        if (
            file in seen
            or unit(file) in NOT_FOLLOWED
            or (unit(file) == CONFIG and stage != "profile")
        ):
            continue
        seen.add(file)
        todo += imports(file) if unit(file) != CONFIG else ()
    return sorted({unit(file) for file in seen})
