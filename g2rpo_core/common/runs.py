"""Name runs as paths and DVC's stages do, and read DVC's lock file."""

import hashlib
import json
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, parsed_yaml, read_text

TRAINING_RECORDS = "records.parquet"  # in a run's folder: its training, iteration by iteration
SCRATCH = Path(".cache", "resume")  # what is interrupted, or not yet known to DVC
BASE = ("base", 0)  # the entry and seed that stand for the untrained model


def run_name(method: str, seed: int | str) -> str:
    """Return the name of one training run, or of its evaluation."""
    return f"{method}-{seed}"


def check_one_kind(folder: Path) -> None:
    """Check that a run's folder does not hold a LoRA and whole weights, which are of two trainings; UserError otherwise."""
    if (folder / "lora").is_dir() and (folder / "transformer").is_dir():
        raise UserError(f"{folder}: has lora and transformer, of two trainings: delete the older one, or train the run again")


def hash_of_folder(folder: Path) -> str:
    """Return the hash of a folder's content as DVC's lock has it."""
    files = sorted((file.relative_to(folder).as_posix(), file) for file in folder.rglob("*") if file.is_file())
    entries = [{"md5": hashlib.file_digest(file.open("rb"), "md5").hexdigest(), "relpath": name} for name, file in files]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def read_lock(path: Path) -> dict[str, dict]:
    """Return the stages of a dvc.lock by name: `deps` and `outs` with their `path` and `md5`; UserError if it is not such a file."""
    return stages_in(read_text(path), path)


def stages_in(text: str, path: Path) -> dict[str, dict]:
    """Return the same from a file's text."""
    data = parsed_yaml(text, path)
    stages = data.get("stages") if isinstance(data, dict) else None
    if not isinstance(stages, dict) or not all(map(_is_stage, stages.values())):
        raise UserError(complaint(path, "is not a DVC lock file with stages"))
    return stages


def _is_stage(stage: object) -> bool:
    if not isinstance(stage, dict):
        return False
    parts = [stage.get(part, []) for part in ("deps", "outs")]
    return all(isinstance(part, list) and all(map(_is_entry, part)) for part in parts)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("path"), str) and isinstance(entry.get("md5"), str)
