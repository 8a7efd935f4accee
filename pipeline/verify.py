"""Compare the outputs of this checkout with the committed ones: `make verify`.

It says of every output that differs by how much, as far as DVC's cache or git has the committed
one. Exit status: 0 if all are equal, else 1. `g2rpo report --compare HEAD now` compares results.
"""

import hashlib
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from dvc.exceptions import DvcException
from dvc.repo import Repo, lock_repo
from safetensors.torch import load

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_json
from g2rpo_core.foundation.runs import stages_in
from g2rpo_core.foundation.texts import echo, reason
from pipeline.graph import explain
from stages.entry import ends_in_one_line

SHOWN = 8  # files of an output
# How the numbers of a format are read, by name
READERS: dict[str, Callable[[bytes], Any]] = {
    ".json": lambda data: pd.json_normalize(json.loads(data)).select_dtypes("number"),
    ".parquet": lambda data: pd.read_parquet(io.BytesIO(data)).select_dtypes("number"),
    ".safetensors": lambda data: {
        name: value.double().numpy() for name, value in load(data).items()
    },
}
NOT_AT_HAND = "of the committed one only its hash is known here"


@ends_in_one_line
def main() -> None:
    committed = committed_outputs()
    here, cache = outputs_here()
    states = {
        path: "missing" if md5 is None else "equal" if md5 == committed.get(path) else "different"
        for path, md5 in here.items()
    }
    for path, state in states.items():
        if state != "equal":
            echo(f"{state:10} {path}")
        if state == "different":
            lines = list(apart(Path(path), committed.get(path, ""), cache))
            more = [f"and {len(lines) - SHOWN} others"] if len(lines) > SHOWN else []
            echo(*(f"{'':11}{line}" for line in lines[:SHOWN] + more))
    counts = Counter(states.values())
    told = ", ".join(f"{counts[state]} {state}" for state in ("equal", "different", "missing"))
    if counts["equal"] == len(states):
        echo(f"{told}: every output is the committed one")
        return
    echo(f"{told}; compare the results by: g2rpo report --compare HEAD now")
    sys.exit(1)


def committed_outputs() -> dict[str, str]:
    """Return the hashes of the last commit's dvc.lock by path; UserError outside a git checkout."""
    done = subprocess.run(["git", "show", "HEAD:./dvc.lock"], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"{Path.cwd()}: no committed dvc.lock to compare with: {reason(done.stderr)}"
        )
    stages = stages_in(done.stdout, Path("HEAD:dvc.lock")).values()
    return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", [])}


def outputs_here() -> tuple[dict[str, str | None], Path]:
    """Return the hash of every output by path, None if it is missing, and the folder of the cache.

    UserError if DVC cannot tell.
    """
    try:
        repo = Repo()
        with lock_repo(repo):
            outs = [out for stage in repo.index.stages if stage.cmd for out in stage.outs]
            hashes = {
                str(out.def_path): out.get_hash().value if out.exists else None for out in outs
            }
            return hashes, Path(repo.cache.local.path)
    except DvcException as error:
        raise UserError(explain(error)) from None


def apart(path: Path, md5: str, cache: Path) -> Iterator[str]:
    """Yield how far an output, or each of a folder's files, is from the committed one."""
    if not md5.endswith(".dir"):
        yield file_apart(path, md5, cache)
        return
    listing = cache / md5[:2] / md5[2:]
    if not listing.is_file():
        yield NOT_AT_HAND
        return
    before = {entry["relpath"]: entry["md5"] for entry in read_json(listing, list)}
    here = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    for name in sorted(before.keys() | here.keys()):
        if name not in here or name not in before:
            yield f"{name}: {'missing' if name in before else 'only'} here"
        elif hashlib.md5(here[name].read_bytes()).hexdigest() != before[name]:
            yield f"{name}: {file_apart(here[name], before[name], cache)}"


def file_apart(path: Path, md5: str, cache: Path) -> str:
    """Return by how much a file's numbers, or its size, differ from those of the committed one."""
    cached, new = cache / md5[:2] / md5[2:], path.read_bytes()
    blob = ["git", "cat-file", "blob", f"HEAD:./{path}"]
    kept = [
        subprocess.run(blob, capture_output=True).stdout,
        *map(Path.read_bytes, cached.parent.glob(cached.name)),
    ]
    old = next((each for each in kept if hashlib.md5(each).hexdigest() == md5), None)
    if old is None:
        return NOT_AT_HAND
    try:
        before, after = numbers(path, old), numbers(path, new)
    except Exception:  # noqa: BLE001 - whatever a library raises of a damaged file
        before = after = {}
    if not before:
        return f"{len(old)} -> {len(new)} bytes"
    shared = [name for name in before if name in after and before[name].shape == after[name].shape]
    far = {name: float(np.abs(after[name] - before[name]).max(initial=0)) for name in shared}
    worst = max(far, key=lambda name: far[name], default="")
    other = len(before.keys() | after.keys()) - len(shared)
    also = f"; {other} are in one of both, or of another shape" if other else ""
    return f"differs by {far.get(worst, 0):.2g} at most, in {worst}{also}"


def numbers(path: Path, data: bytes) -> Mapping[str, np.ndarray]:
    """Return the numbers of a file's content by name; none for a format without names."""
    found = READERS[path.suffix](data) if path.suffix in READERS else {}
    return {str(name): np.nan_to_num(np.asarray(value, float)) for name, value in found.items()}


if __name__ == "__main__":
    main()
