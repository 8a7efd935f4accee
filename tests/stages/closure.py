"""Which of the project's own files a stage's module imports, directly or not: what it must declare to DVC."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("g2rpo_core", "stages")
# Its values reach a stage as declared parameters alone, so a change of its code is no reason to run a stage again.
NOT_FOLLOWED = {
    "g2rpo_core/config.py",
    "g2rpo_core/settings.py",
    "g2rpo_core/errors.py",
    "stages/common.py",
    "stages/__init__.py",
}


def module_file(name: str) -> Path | None:
    path = ROOT / Path(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imports(file: Path) -> set[Path]:
    """The project's files that `file` imports anywhere, inside functions too, with the packages' __init__ files."""
    package = list(file.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names |= {".".join([*base, alias.name]) for alias in node.names} | {".".join(base)}
    files = set()
    for name in names:
        parts = name.split(".")
        if parts[0] in PACKAGES:
            files |= {module_file(".".join(parts[:end])) for end in range(1, len(parts) + 1)}
    return files - {None}


def closure(stage: str) -> list[str]:
    """Paths below the root of every file that the module `stages.<stage>` needs, sorted; empty __init__ files left out."""
    todo, seen = [ROOT / "stages" / f"{stage}.py"], set()
    while todo:
        file = todo.pop()
        if file in seen or str(file.relative_to(ROOT)) in NOT_FOLLOWED:
            continue
        seen.add(file)
        todo += imports(file)
    return sorted(str(file.relative_to(ROOT)) for file in seen if file.stat().st_size)
