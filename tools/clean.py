"""Remove the environment and everything that the pipeline makes; `make clean` starts this.

Runs that DVC's cache does not hold would be lost, so they are named, and removed only with
CONFIRM=1. docs/howto/disk.md says what is left. Needs nothing but Python's standard library.
"""

import configparser
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.environment import HOME, LINK, ROOT, Failure, alone

# What their stages, and `make lock`, make or download again
MADE = ("models", "prompts", "published", "embeddings", ".cache/tools", "studies/*/base-*")
OF_STUDIES = [
    f"studies/*/{home}{name}" for home in ("", "base-*/") for name in ("runs", "evaluations")
]
RUNS = (".cache/resume", "runs", "evaluations", *OF_STUDIES)


def main() -> None:
    """Remove all of it, unless something would be lost, and name it."""
    try:
        HOME.mkdir(parents=True, exist_ok=True)
        with alone():
            objects = cached_files()
            lost = [each for path in found(*RUNS) for each in missing(path, objects)]
            if lost and os.environ.get("CONFIRM") != "1":
                names = ", ".join(str(path.relative_to(ROOT)) for path in lost)
                raise Failure(
                    f"runs in no cache: {names}; nothing was removed; "
                    "to remove them for good: make clean CONFIRM=1"
                )
            ours = [LINK] if LINK.resolve().parent == HOME else []
            removed = [*found(*RUNS, *MADE), *ours, HOME]
            for path in removed:
                if path.is_symlink():  # of a link, the link alone
                    path.unlink()
                else:
                    shutil.rmtree(path)
        print("removed:", *(path.relative_to(ROOT) for path in removed))
    except (Failure, OSError) as problem:
        sys.exit(f"error: {problem}")


def found(*patterns: str) -> list[Path]:
    """Return what the checkout has of these."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def cached_files() -> Path:
    """Return the folder of DVC's cache, where files and folders are named by their content."""
    config = configparser.ConfigParser()
    config.read([ROOT / ".dvc" / "config", ROOT / ".dvc" / "config.local"])
    return ROOT / ".dvc" / config.get("cache", "dir", fallback="cache") / "files" / "md5"


def missing(folder: Path, objects: Path) -> Iterator[Path]:
    """Yield the innermost folders of runs that the cache cannot give back.

    A run's lock stays when the run is gone, and is nothing to lose.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    listed = sorted((path.relative_to(folder).as_posix(), hash_of(path)) for path in files)
    # DVC names a folder by the hash of the JSON of its sorted files
    entries = [{"md5": digest, "relpath": name} for name, digest in listed]
    own = hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest() + ".dir"
    kept = {name: objects / name[:2] / name[2:] for name in (own, *dict(listed).values())}
    # DVC itself looks at no byte of a cached file that is read-only
    if all(each.exists() and name.startswith(hash_of(each)) for name, each in kept.items()):
        return
    if any(path.parent == folder for path in files):
        yield folder
        return
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from missing(inner, objects)


@cache
def hash_of(file: Path) -> str:
    """Return the hash of a file as DVC has it."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "md5").hexdigest()


if __name__ == "__main__":
    main()
