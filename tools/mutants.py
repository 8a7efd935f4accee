"""Would the fast tests notice a fault? Tries a seeded sample of small ones, each with the fast tests of its package.

    python tools/mutants.py --count 60 --seed 1      one line per fault, then how many were caught; look at the survivors

A fault is one node of the syntax tree changed: an operator, a comparison, a number, a truth value, an argument or a statement
left out. Third-party packages are imported once; each fault is tried in a process forked from there, in which the faulty module
replaces that of the file. A failing test or a timeout catches it.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {  # for each package: those that know it best come first
    "sampling": ["tests/sampling", "tests/rollout"],
    "algorithm": [
        "tests/algorithm",
        "tests/training/test_credit.py",
        "tests/training/test_closed_forms.py",
        "tests/training/test_batch.py",
        "tests/rollout",
    ],
    "rollout": ["tests/rollout", "tests/training/test_closed_forms.py", "tests/training/test_trainer.py"],
    "training": ["tests/training"],
}
LEFT_OUT = {"settings.py"}  # ranges and defaults are data
LIMIT = 300  # seconds for the tests of one fault
SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def faults(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes that can be changed and how; `apply` does it in place."""
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        for inner in ast.walk(getattr(node, field, None) or ast.Pass())
    }
    # that a value is frozen is for the type checker
    annotations |= {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field"
        for inner in ast.walk(node)
    }  # ranges and defaults of settings are data, as in LEFT_OUT
    annotations |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "frozen"}
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED and not _of_types(node):
            yield node, "operator"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "comparison"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield node, "constant"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield node, "sign"
        elif isinstance(node, ast.Call) and node.keywords and node.keywords[0].arg not in (None, "description", "frozen"):
            yield node, "argument"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "statement"


def _of_types(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def apply(node: ast.AST, kind: str) -> None:
    if kind == "operator":
        node.op = SWAPPED[type(node.op)]()
    elif kind == "comparison":
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif kind == "constant":
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    elif kind == "sign":
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif kind == "argument":
        del node.keywords[0]
    elif kind == "statement":
        node.value = ast.Constant(None)


class Faulty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from another source than its file's."""

    def __init__(self, name: str, path: Path, source: str):
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)  # noqa: S102 - the project's own code, changed


def caught(path: Path, source: str, tests: list[str]) -> bool:
    """Whether the tests notice; they run in their own process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        sys.meta_path.insert(0, Faulty(name, path, source))
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not pipeline", *tests])) != 0)
    until = time.monotonic() + LIMIT
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.1)
    return ended[1] != 0


def sample(count: int, seed: int) -> list[tuple[Path, int, str, str]]:
    """file, line, what was changed, and the faulty source."""
    every = []
    for package in TESTS:
        for path in sorted((ROOT / "g2rpo_core" / package).glob("*.py")):
            if path.name not in LEFT_OUT:
                every += [(path, index) for index, _ in enumerate(faults(ast.parse(path.read_text())))]
    chosen = []
    for path, index in random.Random(seed).sample(every, min(count, len(every))):
        tree = ast.parse(path.read_text())
        node, kind = list(faults(tree))[index]
        before = ast.unparse(node)
        apply(node, kind)
        chosen.append(
            (path, node.lineno, f"{kind}: {before} -> {ast.unparse(node)}"[:150], ast.unparse(ast.fix_missing_locations(tree)))
        )
    print(f"{len(chosen)} of {len(every)} possible faults, seed {seed}", flush=True)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "G2RPO_ONCE": tempfile.mkdtemp(prefix="mutants-")}
    for name in (
        "accelerate",
        "diffusers",
        "hypothesis",
        "open_clip",
        "pandas",
        "peft",
        "pyarrow",
        "pytest",
        "tensorboard",
        "torchvision",
    ):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    sound = [package for package, tests in TESTS.items() if caught(ROOT / "g2rpo_core" / package / "__init__.py", "", tests)]
    if sound:
        sys.exit(f"error: the tests of {', '.join(sound)} fail without any fault")
    survivors = 0
    chosen = sample(args.count, args.seed)
    for number, (path, line, what, source) in enumerate(chosen, 1):
        start = time.monotonic()
        noticed = caught(path, source, TESTS[path.parent.name])
        survivors += not noticed
        print(
            f"{number:3} {'caught' if noticed else 'SURVIVED':8} {path.relative_to(ROOT)}:{line} {what} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} caught, {100 * (1 - survivors / len(chosen)):.0f} %")


if __name__ == "__main__":
    main()
