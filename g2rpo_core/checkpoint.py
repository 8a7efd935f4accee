"""Unfinished runs: kept beside the outputs, written whole or not at all, continued only by the run that they belong to."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

SCRATCH = Path(".cache/unfinished")  # git-ignored, no output of any stage: DVC deletes outputs before a stage runs


def identity(settings: Mapping[str, object], inputs: Mapping[str, Path]) -> dict[str, str]:
    """What a run is made of, by name: a hash of each setting, of each input file or folder, and of every file of the core.

    settings: values that JSON can hold. A checkpoint is continued only under the same identity.
    """
    code = Path(__file__).parent
    found = {f"setting {name}": _hash(json.dumps(value, sort_keys=True).encode()) for name, value in settings.items()}
    found |= {f"input {name}": _hash_files(path) for name, path in inputs.items()}
    return found | {f"code {file.relative_to(code)}": _hash(file.read_bytes()) for file in sorted(code.rglob("*.py"))}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash_files(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(str(file.relative_to(path)).encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one unfinished run: `folder`/000025.pt, ...; keep: how many of the newest stay."""

    def __init__(self, folder: Path, made_of: Mapping[str, str], keep: int = 1):
        self.folder, self.made_of, self.keep = folder, dict(made_of), keep

    def save(self, number: int, state: Mapping[str, object]) -> Path:
        """Writes a state of tensors and plain values aside, then renames it: a file of that name is always whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{number:06d}.pt"
        with path.with_suffix(".part").open("wb") as file:
            torch.save({"made_of": self.made_of, "state": dict(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".part").replace(path)
        for old in self._newest_first()[self.keep :]:
            old.unlink()
        return path

    def load(self) -> dict | None:
        """The newest state of this very run; each checkpoint that is not used is named with the reason. None if there is none."""
        for path in self._newest_first():
            try:
                saved = torch.load(path, map_location="cpu", weights_only=True)
                other = {
                    key for key in saved["made_of"].keys() | self.made_of if saved["made_of"].get(key) != self.made_of.get(key)
                }
            except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
                print(f"{path} cannot be read and is not continued ({type(error).__name__})", file=sys.stderr)
                continue
            if not other:
                return saved["state"]
            named = ", ".join(sorted(other)[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
            print(f"{path} was made with another {named}: it is not continued", file=sys.stderr)
        return None

    def remove(self) -> None:
        """Deletes every checkpoint of the run, at its success."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _newest_first(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.pt"), reverse=True)


class Terminated(BaseException):
    """SIGTERM came at a moment when nothing is half done."""


class Interruptible:
    """Turns SIGTERM into Terminated, but only inside its `with` blocks; outside of them it waits for the next one.

    So the long parts of an iteration, which change nothing, end at once, and an optimizer's step is never cut in half.
    """

    def __init__(self):
        self.asked = self.inside = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: object) -> None:
        self.asked = True
        if self.inside:
            raise Terminated

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.inside = True
        try:
            if self.asked:
                raise Terminated
            yield
        finally:
            self.inside = False
