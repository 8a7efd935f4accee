"""Read the committed outputs of the pipeline: hashes, and contents where they are at hand.

Contents are in DVC's cache, or in git where a stage's output is committed. A clone has no cache: of
a folder only its hash is known.

Experimental: main works without it.
"""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dvc.exceptions import DvcException
from dvc.repo import Repo, lock_repo

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_json, reading
from g2rpo_core.foundation.runs import stages_in
from g2rpo_core.foundation.texts import reason
from pipeline.graph import explain


@dataclass(frozen=True)
class Outputs:
    """What the pipeline's stages read and write, as it is on disk."""

    hashes: dict[str, str | None]
    """Of every output by its path; None if it is missing."""
    stages: dict[str, str]
    """Of every output by its path: its stage."""
    deps: dict[str, dict[str, Any]]
    """For every stage the hash of each input by path; of a settings file, those that it reads."""
    cache: Path
    """DVC's."""


def read_outputs() -> Outputs:
    """Read the hashes of all that is on disk; UserError if DVC cannot."""
    hash_of = lambda one: one.get_hash().value if one.exists else None
    try:
        repo = Repo()
        with lock_repo(repo):
            stages = [stage for stage in repo.index.stages if stage.cmd]
            return Outputs(
                {str(out.def_path): hash_of(out) for stage in stages for out in stage.outs},
                {str(out.def_path): stage.name for stage in stages for out in stage.outs},
                {
                    stage.name: {str(dep.def_path): hash_of(dep) for dep in stage.deps}
                    for stage in stages
                },
                Path(repo.cache.local.path),
            )
    except DvcException as error:
        raise UserError(explain(error)) from None


def committed_stages() -> dict[str, dict]:
    """Return the stages of the last commit's dvc.lock; UserError outside a git checkout."""
    done = subprocess.run(["git", "show", "HEAD:./dvc.lock"], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"{Path.cwd()}: no committed dvc.lock to compare with: {reason(done.stderr)}"
        )
    return stages_in(done.stdout, Path("HEAD:dvc.lock"))


def committed_file(path: str) -> bytes | None:
    """Return the content of a file in the last commit; None if that has no such file."""
    done = subprocess.run(["git", "cat-file", "blob", f"HEAD:./{path}"], capture_output=True)
    return None if done.returncode else done.stdout


def committed_json(path: str) -> Any:
    """Return the data of a JSON file in the last commit; None if that has no such file."""
    blob = committed_file(path)
    if blob is None:
        return None
    with reading(Path(f"HEAD:{path}"), hint="commit one that is whole"):
        return json.loads(blob)


@contextmanager
def content(path: str, md5: str, cache: Path) -> Iterator[Path | None]:
    """Yield a file with the committed content of an output, or None if it is not at hand."""
    cached = cache / md5[:2] / md5[2:]
    if cached.is_file() and md5_of(cached) == md5:
        yield cached
        return
    blob = committed_file(path)
    if blob is None or hashlib.md5(blob).hexdigest() != md5:
        yield None
        return
    with TemporaryDirectory() as folder:
        file = Path(folder, Path(path).name)
        file.write_bytes(blob)
        yield file


def files_in(md5: str, cache: Path) -> dict[str, str] | None:
    """Return the hashes of the files in a committed folder, or None if DVC's cache lacks it."""
    listing = cache / md5[:2] / md5[2:]
    if not listing.is_file():
        return None
    return {entry["relpath"]: entry["md5"] for entry in read_json(listing, list)}


def md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
