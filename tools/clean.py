"""Remove the environment and everything that the pipeline makes; `make clean` starts this.

Runs that DVC's cache does not hold would be lost, so they are named, and removed only after a yes
or with CONFIRM=1. What takes room and stays is listed, with how to give it back.

Needs nothing but Python's standard library.
"""

import configparser
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.environment import HOME, LINK, ROOT, Failure, alone

# What their stages, and `make lock`, make or download again
MADE = ("models", "prompts", "published", "embeddings", ".cache/tools")
OF_STUDIES = [
    f"studies/*/{home}{name}" for home in ("", "base-*/") for name in ("runs", "evaluations")
]
RUNS = (".cache/resume", "runs", "evaluations", *OF_STUDIES)
SHOWN = 10


# How to give back what it leaves
OF_CACHE = "outputs of every run; rm -r {}, or, while .venv is there, dvc gc --workspace"
OF_HUB = "models and data sets of the Hugging Face hub; rm -r {}"
LEFT = {
    ".cache/live": "curves and sample images",
    ".cache/made": "notes of what was made from which settings",
    ".cache/prefect": "the history of flows",
    ".cache/scores": "scores of folders of images",
    ".cache/reproduce": "logs of stages",
    ".cache/studies": "logs of studies",
    ".cache/traced": "made again when needed",
    "reports": "results: git has those that are committed",
    "site": "the documents as a site",
}


def main() -> None:
    """Ask where something would be lost, then remove, and list what is removed and left."""
    try:
        HOME.mkdir(parents=True, exist_ok=True)
        with alone():
            cache = Cache(ROOT)
            runs = [path for pattern in RUNS for path in sorted(ROOT.glob(pattern))]
            if lost := [
                str(part.relative_to(ROOT)) for path in runs for part in cache.missing(path)
            ]:
                confirm(lost)
            made = [*runs, *(ROOT / name for name in MADE), *ROOT.glob("studies/*/base-*")]
            removed = [(path, size(path), "") for path in (*made, HOME) if path.exists()]
            for path in made:
                remove(path)
            if LINK.is_symlink() and (ROOT / os.readlink(LINK)).parent == HOME:
                LINK.unlink()
            elif (LINK / "ready").exists() and not LINK.is_symlink():  # made by an earlier Makefile
                shutil.rmtree(LINK)
            shutil.rmtree(HOME)
        show("removed", removed)
        show("left", list(left(cache)))
    except (Failure, OSError) as problem:
        sys.exit(f"error: {problem}")
    except (KeyboardInterrupt, EOFError):
        sys.exit("\nerror: nothing was removed")


def left(cache: "Cache") -> Iterator[tuple[Path, int, str]]:
    """Yield the folders that take room and stay: path, bytes, and how to give them back."""
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    notes = {cache.folder: OF_CACHE, hub: OF_HUB} | {ROOT / name: LEFT[name] for name in LEFT}
    others = {path: "rm -r {}" for path in sorted(ROOT.glob(".cache/*")) if path.is_dir()}
    for path, note in {**others, **notes}.items():
        if path.exists() and (taken := size(path)):
            if path.parent == ROOT / ".cache" and path in notes:
                note += "; rm -r {}"
            yield path, taken, note.format(shown(path))


def show(title: str, rows: list[tuple[Path, int, str]]) -> None:
    """Print a table of folders, the largest first."""
    print(f"{title}: {human(sum(taken for _, taken, _ in rows))}")
    for path, taken, note in sorted(rows, key=lambda row: -row[1]):
        print(f"  {human(taken):>8}  {shown(path)}{': ' * bool(note)}{note}")


def shown(path: Path) -> str:
    """Return the path as users type it in the checkout."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def size(folder: Path) -> int:
    """Return the bytes of a folder's files, each once; of what a link leads to, none."""
    files: dict[tuple[int, int], int] = {}
    for above, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = os.lstat(Path(above, name))
                files[status.st_dev, status.st_ino] = status.st_size
    return sum(files.values())


def human(count: float) -> str:
    """Return a number of bytes as people read it."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


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
        self.folder = root / ".dvc" / config.get("cache", "dir", fallback="cache")
        self.objects = self.folder / "files" / "md5"

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
