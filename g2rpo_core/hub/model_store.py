"""Finds the models: the folder of the `models` stage with its lock file `models.lock.json`.

For every model, the lock has the size and SHA-256 of every file, and either the folder beside the
lock in which the model was built, or its repo and revision on the hub (then the files are in the
Hugging Face cache, and pickled ones beside it as safetensors).
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path, PurePosixPath

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import (
    complaint,
    existing,
    in_one_line,
    read_json,
    write_whole,
)
from g2rpo_core.foundation.manifest import damages

LOCK = "models.lock.json"
# Beside the lock: what the stage `models` measured of the models that it built, by name
QUALITY = "quality.json"
HASHED = 2**26  # bytes; up to this size every load checks a file's hash, not only its size


class ModelStore:
    """The models of a lock that `write_lock` wrote, read when the first model is requested.

    stage: the one that made it, `models` or `published`; folders of `published` may be anywhere.
    UserError if the lock is missing or is none.
    """

    def __init__(self, root: Path, stage: str = "models"):
        self.root, self.stage = Path(root), stage
        # DVC does not keep these files: they are in the hub's cache
        self.fetch = f"dvc repro --force --single-item {stage}"

    @cached_property
    def _entries(self) -> dict[str, dict]:
        file = existing(self.root / LOCK)
        entries = read_json(file, dict)
        for name, entry in entries.items():
            if problem := _problem_of_entry(entry, self.stage):
                raise UserError(complaint(file, f"{name}: {problem}"))
        return entries

    def entry(self, name: str) -> dict:
        """Return the lock's entry of a model; UserError if this profile has no such model."""
        if name not in self._entries:
            raise UserError(
                f"{self.root / LOCK}: has no model {name!r}, only {', '.join(self._entries)}"
            )
        return self._entries[name]

    def source(self, name: str) -> str | None:
        """Return the repository of a model; None for one that was built here, or is missing."""
        return self.entry(name).get("repo") if (self.root / LOCK).exists() else None

    def folder(self, name: str) -> Path:
        """Return the folder of a model's files, checked (`check_files`); downloads nothing."""
        entry = self.entry(name)
        folder, files = self.root / entry.get("folder", ""), entry["files"]
        if entry.get("without_pickles"):
            folder = safe_folder(entry, entry.get("variant"))
            if not (folder / LOCK).exists():
                raise UserError(
                    f"{folder} is gone, or has no {LOCK}: make it again with `{self.fetch}`"
                )
            files = read_json(folder / LOCK, dict)
        elif "folder" not in entry:
            folder = self._of_cache(entry)
        check_files(folder, files)
        return folder

    def weights(self, name: str) -> Path:
        """Return a published model's chosen file, or folder, for `weights.stored.weights_in`."""
        return self.folder(name) / self.entry(name).get("weights", "")

    def _of_cache(self, entry: dict) -> Path:
        try:
            return Path(
                snapshot_download(
                    entry["repo"],
                    revision=entry["revision"],
                    allow_patterns=list(entry["files"]),
                    local_files_only=True,
                )
            )
        except LocalEntryNotFoundError:
            raise UserError(
                f"{entry['repo']} at {entry['revision']} is gone from the Hugging Face cache: "
                f"fetch it again with `{self.fetch}`"
            ) from None


def check_files(folder: Path, files: dict[str, dict]) -> None:
    """Check files; UserError for missing ones, wrong sizes or, up to HASHED bytes, wrong hashes."""
    if wrong := damages(folder, files, HASHED):
        raise UserError(complaint(folder, f"{in_one_line(wrong)} (as {LOCK} has it)"))


def _problem_of_entry(entry: object, stage: str) -> str | None:
    """Say what is wrong with a model's entry in the lock; None if nothing is.

    The folder may be anywhere if the user named it.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("files"), dict):
        return "is not a model's entry with files"
    if not isinstance(entry.get("folder"), str) and not all(
        isinstance(entry.get(key), str) for key in ("repo", "revision")
    ):
        return "has neither a folder nor a repo and its revision"
    outside = stage == "published" or entry.get("outside") is True
    inside = [
        None if outside else entry.get("folder"),
        entry.get("architecture"),
        entry.get("weights"),
    ]
    for path in [*entry["files"], *filter(None, inside)]:
        if (
            not isinstance(path, str)
            or PurePosixPath(path).is_absolute()
            or ".." in PurePosixPath(path).parts
        ):
            return f"{path!r} would lead out of its folder"
    return next(
        (
            f"{path} has no size and sha256"
            for path, about in entry["files"].items()
            if not (
                isinstance(about, dict)
                and isinstance(about.get("size"), int)
                and isinstance(about.get("sha256"), str)
            )
        ),
        None,
    )


def safe_folder(entry: dict, variant: str | None = None) -> Path:
    """Return the folder, next to the hub's cache, of a model's converted pickles or variant."""
    # the name depends on what was converted, so that another file is never mistaken for it
    content = hashlib.sha256(
        "".join(file["sha256"] for _, file in sorted(entry["files"].items())).encode()
    ).hexdigest()[:16]
    name = entry["repo"].replace("/", "--") if "repo" in entry else Path(entry["folder"]).name
    return Path(constants.HF_HOME, "g2rpo", name, f"{content}.{variant}" if variant else content)


def write_lock(root: Path, entries: dict[str, dict]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / LOCK, json.dumps(entries, indent=1, sort_keys=True) + "\n")
