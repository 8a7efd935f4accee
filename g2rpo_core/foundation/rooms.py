"""Imports experimental modules, which may have been deleted: all else works without them.

Which modules they are stands in pyproject.toml, in the import contract of that name;
`tests/house/test_rings.py` deletes each.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def experimental(module: str) -> ModuleType | None:
    """Import a module; None if it was deleted."""
    return import_module(module) if find_spec(module) else None
