"""Remove the environment and everything that the pipeline makes; `make clean` starts this.

Runs that DVC's cache does not hold would be lost, so they are named, and removed only after a yes
or with CONFIRM=1. Needs nothing but Python's standard library.
"""

import configparser
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from tools.environment import HOME, LINK, ROOT, Failure, alone

# What their stages, and `make lock`, make or download again
MADE = ("models", "prompts", "published", "embeddings", ".cache/tools")
OF_STUDIES = [
    f"studies/*/{home}{name}" for home in ("", "base-*/") for name in ("runs", "evaluations")
]
RUNS = (".cache/resume", "runs", "evaluations", *OF_STUDIES)
SHOWN = 10


def main() -> None:
    """Ask where something would be lost, then remove."""
    try:
        HOME.mkdir(parents=True, exist_ok=True)
        with alone():
            cache = Cache(ROOT)
            runs = [path for pattern in RUNS for path in sorted(ROOT.glob(pattern))]
            if lost := [
                str(part.relative_to(ROOT)) for path in runs for part in cache.missing(path)
            ]:
                confirm(lost)
            for path in [*runs, *(ROOT / name for name in MADE), *ROOT.glob("studies/*/base-*")]:
                remove(path)
            if LINK.is_symlink() and (ROOT / os.readlink(LINK)).parent == HOME:
                LINK.unlink()
            elif (LINK / "ready").exists() and not LINK.is_symlink():  # made by an earlier Makefile
                shutil.rmtree(LINK)
            shutil.rmtree(HOME)
    except (Failure, OSError) as problem:
        sys.exit(f"error: {problem}")
    except (KeyboardInterrupt, EOFError):
        sys.exit("\nerror: nothing was removed")


def confirm(lost: list[str]) -> None:
    """Fail unless the user agrees to lose these folders."""
    if os.environ.get("CONFIRM") == "1":
        return
    count = f"{len(lost)} folder{'s' * (len(lost) > 1)} of runs in no cache"
    names = ", ".join(lost[:SHOWN]) + (
        f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    )
    if not sys.stdin.isatty():
        raise Failure(
            f"{count}: {names}; nothing was removed; to remove them: make clean CONFIRM=1"
        )
    if input(f"{count}: {names}\nRemove them for good? [y/N] ").strip().lower() not in ("y", "yes"):
        raise Failure("nothing was removed")


def remove(path: Path) -> None:
    """Remove a folder; of a link, the link alone."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


class Cache:
    """DVC's cache, in which folders are looked up by their content, as DVC names it."""

    def __init__(self, root: Path):
        config = configparser.ConfigParser()
        config.read([root / ".dvc" / "config", root / ".dvc" / "config.local"])
        self.objects = (
            root / ".dvc" / config.get("cache", "dir", fallback="cache") / "files" / "md5"
        )

    def missing(self, folder: Path) -> list[Path]:
        """Return the innermost folders below this one that the cache cannot give back."""
        return self._look(folder)[1]

    def _look(self, folder: Path) -> tuple[list[dict[str, str]], list[Path], bool]:
        """Return the folder's files, what the cache lacks of it, and whether it has all files."""
        files, lost, complete = [], [], True
        # a run's lock stays when the run is gone, and is nothing to lose
        found = [path for path in sorted(folder.iterdir()) if path.suffix != ".lock"]
        for path in found:
            if path.is_dir():
                inner, its_lost, its_complete = self._look(path)
                files += [
                    {"md5": each["md5"], "relpath": f"{path.name}/{each['relpath']}"}
                    for each in inner
                ]
                lost += its_lost
                complete &= its_complete
            else:
                with path.open("rb") as content:
                    digest = hashlib.file_digest(content, "md5").hexdigest()
                files.append({"md5": digest, "relpath": path.name})
                complete &= self._has(digest)
        # DVC names a folder by the hash of the JSON of its sorted files
        files.sort(key=lambda file: file["relpath"])
        if complete and self._has(
            hashlib.md5(json.dumps(files, sort_keys=True).encode()).hexdigest() + ".dir"
        ):
            return files, [], True
        own = any(not path.is_dir() for path in found)
        return files, [folder] if own else lost, complete

    def _has(self, name: str) -> bool:
        return (self.objects / name[:2] / name[2:]).exists()


if __name__ == "__main__":
    main()
