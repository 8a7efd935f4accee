"""Name runs as paths and DVC's stages do, and read DVC's lock file."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, files_in, parsed_yaml, read_text

TRAINING_RECORDS = "records.parquet"  # in a run's folder: its training, iteration by iteration
HELDOUT_CURVE = "curve.json"  # in a run's folder: its held-out rewards
SCRATCH = Path(".cache", "resume")  # what is interrupted, or not yet known to DVC
CODE = "the stage's code"  # the setting of a run that has its version (stages/versions.py)
BASE = ("base", 0)  # the entry and seed that stand for the untrained model


def run_name(method: str, seed: int | str) -> str:
    """Return the name of one training run, or of its evaluation."""
    return f"{method}-{seed}"


def is_base(method: str) -> bool:
    """Tell whether a name is of the untrained model: `base`, or one of `name_bases`."""
    return method.partition(".")[0] == BASE[0]


def name_bases(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Name the base with each settings: `base` with the first, then by what differs from it.

    As `base.guidance_1`: no entry of a profile has a dot in its name.
    """
    first = settings[0]
    differing = [
        [f"{key}_{_shown(value)}" for key, value in each.items() if value != first[key]]
        for each in settings
    ]
    return [".".join([BASE[0], *(["_".join(parts)] if parts else [])]) for parts in differing]


def label_bases(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Label the base with each settings in reports, by what differs: `base model, guidance 4.5`."""
    differing = [
        key for key in settings[0] if any(each[key] != settings[0][key] for each in settings)
    ]
    return [
        ", ".join(["base model", *(f"{key} {_shown(each[key])}" for key in differing)])
        for each in settings
    ]


def _shown(value: object) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def drawn_of(method: str, drawn: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return how images are drawn (`sampling.settings.DRAWN`), by name: a run's, or the bases'.

    The latter by `name_bases`, for every run. drawn: `Profile.drawn`; UserError for a name that it
    does not have.
    """
    if method == BASE[0]:
        return dict(zip(name_bases(drawn["base"]), drawn["base"]))
    known = {**drawn["published"], **drawn["methods"]}
    if method not in known:
        raise UserError(
            f"--method {method}: is no entry of the profile's sections methods and published, "
            f"only {', '.join(known)}"
        )
    return {method: known[method]}


def start_of(published: Path, method: str) -> Path:
    """Return the folder of published weights with the lock of those that a method starts from."""
    return published / "start" / method


def evaluation_folder(method: str, seed: int | str) -> Path:
    """Return the folder of a run's evaluation: `g2rpo-1`, or `base-0/guidance_1`."""
    return (
        Path(run_name(*BASE), method.partition(".")[2])
        if is_base(method)
        else Path(run_name(method, seed))
    )


def check_one_kind(folder: Path) -> None:
    """Check that a run's folder does not hold both a LoRA and whole weights; UserError otherwise.

    They are of two trainings.
    """
    if (folder / "lora").is_dir() and (folder / "transformer").is_dir():
        raise UserError(
            f"{folder}: has lora and transformer, of two trainings: delete the older one, "
            "or train the run again"
        )


def hash_of(path: Path) -> str:
    """Return the hash of a file's or a folder's content as DVC's lock has it."""
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    entries = [{"md5": hash_of(path / name), "relpath": name} for name in files_in(path)]
    listing = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(listing, usedforsecurity=False).hexdigest() + ".dir"


def read_lock(path: Path) -> dict[str, dict]:
    """Return the stages of a dvc.lock by name: `deps` and `outs` with their `path` and `md5`.

    UserError if it is not such a file.
    """
    return stages_in(read_text(path), path)


def stages_in(text: str, path: Path) -> dict[str, dict]:
    """Return the same from a file's text."""
    data = parsed_yaml(text, path)
    try:
        for stage in data["stages"].values():
            for entry in [*stage.get("deps", ()), *stage.get("outs", ())]:
                Path(entry["path"], entry["md5"])  # both are texts
    except (TypeError, KeyError, AttributeError):
        raise UserError(complaint(path, "is not a DVC lock file with stages")) from None
    return data["stages"]
