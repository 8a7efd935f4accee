"""Find the weights of rewards: a folder of the stage `models`, or published ones from the hub."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import complaint
from g2rpo_core.foundation.layout import hint_for
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.download import REVISIONS, download_models, known_revisions
from g2rpo_core.hub.model_store import LOCK, ModelStore, write_lock
from g2rpo_core.hub.settings import HubModel
from g2rpo_core.rewards.registry import check, models_of
from g2rpo_core.rewards.spec import Section

# The profile whose repositories `--published` reads, unless --profile names another
PUBLISHED = "flux_hps_clip"
# Here are only locks: the files are in the hub's cache
LOCKS = Path(".cache", "rewards")

# Where models are: a folder with a lock, or repositories by the model's name in `models.repos`
Place = Path | Mapping[str, HubModel]


def folder_of_rewards(names: Sequence[str], section: Section, place: Place) -> Path:
    """Return a folder with the lock of the models that these rewards read.

    Of repositories, those that the rewards need are fetched, and nothing else; lines on stderr name
    them. A second call asks no hub. UserError if a folder has no lock, the repositories lack a
    model, or a reward cannot be built (`check`); otherwise as of `download_models`.
    """
    read = {name: models_of(section, name) for name in names}
    if isinstance(place, Path):
        lock = place / LOCK
        if any(read.values()) and not lock.exists():
            alone = f"`--published` fetches the published weights of {', '.join(names)} alone"
            raise UserError(
                complaint(lock, "does not exist", "; ".join(filter(None, [hint_for(lock), alone])))
            )
        return place
    for name in names:
        check(name, section)
        if lacking := [model for model in read[name] if model not in place]:
            raise UserError(
                f"--published: {name} needs {' and '.join(lacking)} in models.repos: "
                "give a --profile that has it (docs/rewards.md)"
            )
    repos = {model: place[model] for models in read.values() for model in models}
    folder, revisions = LOCKS / _key(repos), REVISIONS / "models.json"
    if not attempt(lambda: _check_fetched(folder, repos, revisions))[0]:
        write_lock(folder, download_models(repos, revisions, folder))
    store = ModelStore(folder)
    # A line for each reward that reads models: `hps: owner/name@revision`
    lines = [
        f"{name}: {', '.join(_source(store.entry(model)) for model in models)}"
        for name, models in read.items()
        if models
    ]
    echo(*lines, file=sys.stderr)
    return folder


def _source(entry: Mapping) -> str:
    return f"{entry['repo']}@{entry['revision'][:12]}" if "repo" in entry else entry["folder"]


def _key(repos: Mapping[str, HubModel]) -> str:
    """Return a hash of the settings, so that each choice of rewards has a lock of its own."""
    settings = {name: model.model_dump() for name, model in repos.items()}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _check_fetched(folder: Path, repos: Mapping[str, HubModel], revisions: Path) -> bool:
    """Say whether a lock has every model at its revision; UserError if files are gone or damaged.

    A profile need not pin a revision: then the one that was looked up counts.
    """
    store = ModelStore(folder)
    for name in repos:
        store.folder(name)
    known = known_revisions(revisions)
    return all(
        model.folder
        or store.entry(name)["revision"] == (model.revision or known.get(str(model.repo)))
        for name, model in repos.items()
    )
