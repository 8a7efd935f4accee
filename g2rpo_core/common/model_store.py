"""Where the models are: the folder of the `models` stage with its lock file `models.lock.json`.

The lock holds for every model either the folder beside the lock in which it was built, or the hub's repo and revision
(then the files are in the Hugging Face cache, pickled ones as safetensors beside it), and the size and SHA-256 of every file.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

from g2rpo_core.errors import UserError, made_by

LOCK = "models.lock.json"


class ModelStore:
    """Reads a lock written by `write_lock`, when the first model is asked for; UserError if there is none."""

    def __init__(self, root: Path):
        self.root = Path(root)

    @cached_property
    def _entries(self) -> dict[str, dict]:
        return json.loads(made_by("models", self.root / LOCK).read_text())

    def entry(self, name: str) -> dict:
        """What the lock says of a model; UserError if this profile has no such model."""
        if name not in self._entries:
            raise UserError(f"{self.root / LOCK}: has no model {name!r}, only {', '.join(self._entries)}")
        return self._entries[name]

    def folder(self, name: str) -> Path:
        """The folder with a model's files; nothing is downloaded."""
        entry = self.entry(name)
        if "folder" in entry:
            return self.root / entry["folder"]
        if entry.get("without_pickles"):
            folder = safe_folder(entry)
            if not folder.exists():
                raise UserError(f"{folder} is gone: make it again by `dvc repro --force --single-item models`")
            return folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        arguments = {"revision": entry["revision"], "allow_patterns": list(entry["files"]), "local_files_only": True}
        try:
            return Path(snapshot_download(entry["repo"], **arguments))
        except LocalEntryNotFoundError:
            raise UserError(
                f"{entry['repo']} at {entry['revision']} is gone from the Hugging Face cache: `dvc repro --force --single-item models`"
            ) from None


def safe_folder(entry: dict) -> Path:
    """Where a published model lies whose pickled checkpoints were converted to safetensors: beside the Hugging Face cache."""
    from huggingface_hub import constants

    # named by what was converted, so that another file is never taken for it
    content = hashlib.sha256("".join(file["sha256"] for file in entry["files"].values()).encode()).hexdigest()[:16]
    return Path(constants.HF_HOME, "g2rpo", entry["repo"].replace("/", "--"), content)


def describe_files(folder: Path) -> dict[str, dict]:
    """Path within `folder` -> size in bytes and SHA-256, for every file below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_lock(root: Path, entries: dict[str, dict]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / LOCK).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
