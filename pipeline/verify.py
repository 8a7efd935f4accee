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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from dvc.repo import Repo, lock_repo
from safetensors.torch import load

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import files_in, read_json
from g2rpo_core.foundation.runs import hash_of, stages_in
from g2rpo_core.foundation.texts import echo, reason
from pipeline.graph import asking_dvc
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
    counts: Counter[str] = Counter()
    for path, md5 in here.items():
        differs = "equal" if md5 == committed.get(path) else "different"
        counts[state := "missing" if md5 is None else differs] += 1
        if state != "equal":
            echo(f"{state:10} {path}")
        if state == "different":
            echo(*(f"{'':11}{line}" for line in apart(Path(path), committed.get(path, ""), cache)))
    told = ", ".join(f"{counts[state]} {state}" for state in ("equal", "different", "missing"))
    if counts["equal"] < len(here):
        echo(f"{told}; compare the results by: g2rpo report --compare HEAD now")
        sys.exit(1)
    echo(f"{told}: every output is the committed one")


def committed_outputs() -> dict[str, str]:
    """Return the hashes of the last commit's dvc.lock by path; UserError outside a git checkout."""
    stages = stages_in(committed_text(Path("dvc.lock")), Path("HEAD:dvc.lock")).values()
    return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", [])}


def committed_text(path: Path) -> str:
    """Return a file of the last commit; UserError outside a git checkout, or if it has none."""
    done = subprocess.run(["git", "show", f"HEAD:./{path}"], capture_output=True, text=True)
    if done.returncode:
        said = reason(done.stderr)
        raise UserError(f"{Path.cwd()}: no committed {path} to compare with: {said}")
    return done.stdout


def outputs_here() -> tuple[dict[str, str | None], Path]:
    """Return the hash of every output by path, None if it is missing, and the folder of the cache.

    Of its bytes: DVC takes what it restored for what its cache's names say. UserError if DVC cannot
    tell which there are.
    """
    with asking_dvc(), Repo() as repo, lock_repo(repo):
        hashes = {
            str(out.def_path): hash_of(Path(out.fs_path)) if out.exists else None
            for stage in repo.index.stages
            if stage.cmd
            for out in stage.outs
        }
        return hashes, Path(repo.cache.local.path)


def apart(path: Path, md5: str, cache: Path) -> Iterator[str]:
    """Yield how far an output, or each of a folder's files, is from the committed one."""
    listing = cache / md5[:2] / md5[2:]
    if not listing.is_file() or f"{hash_of(listing)}.dir" != md5:
        yield NOT_AT_HAND if path.is_dir() else file_apart(path, md5, cache)
        return
    before = {entry["relpath"]: entry["md5"] for entry in read_json(listing, list)}
    here = {name: hash_of(path / name) for name in files_in(path)}
    changed = sorted(name for name in before | here if before.get(name) != here.get(name))
    for name in changed[:SHOWN]:
        if name in before and name in here:
            yield f"{name}: {file_apart(path / name, before[name], cache)}"
        else:
            yield f"{name}: {'missing' if name in before else 'only'} here"
    if len(changed) > SHOWN:
        yield f"and {len(changed) - SHOWN} others"


def file_apart(path: Path, md5: str, cache: Path) -> str:
    """Return by how much a file's numbers, or its size, differ from those of the committed one."""
    kept = [
        subprocess.run(["git", "show", f"HEAD:./{path}"], capture_output=True).stdout,
        *map(Path.read_bytes, (cache / md5[:2]).glob(md5[2:])),
    ]
    new, old = path.read_bytes(), [each for each in kept if hashlib.md5(each).hexdigest() == md5]
    if not old:
        return NOT_AT_HAND
    try:
        before, after = numbers(path, old[0]), numbers(path, new)
        far = {
            name: float(np.abs(after[name] - before[name]).max(initial=0))
            for name in before | after
        }
        worst = max(far, key=lambda name: far[name])
    except Exception:  # noqa: BLE001 - of a damaged file, or one without the same numbers
        return f"{len(old[0])} -> {len(new)} bytes"
    return f"differs by {far[worst]:.2g} at most, in {worst}"


def numbers(path: Path, data: bytes) -> dict[str, np.ndarray]:
    """Return the numbers of a file's content by name; KeyError for a format without names."""
    return {
        str(name): np.nan_to_num(np.asarray(value, float))
        for name, value in READERS[path.suffix](data).items()
    }


if __name__ == "__main__":
    main()
