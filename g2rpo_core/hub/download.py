"""Downloads models and data from the hub by full revision, checked and free of pickles."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal

from httpx2 import HTTPError
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.foundation.files import is_full, read_json, write_whole
from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import safe_folder
from g2rpo_core.hub.pickled import PICKLED, convert_pickles, has_weights_alone
from g2rpo_core.hub.settings import HubFiles, HubModel, PublishedModel

INSTEAD = "or use profile tiny"


# Committed: what was looked up on the hub, of models and of prompts
REVISIONS = Path("reports", "revisions")


class Revisions:
    """Repository -> full commit of what a profile does not pin, from the committed JSON `file`.

    A missing file is empty. A repository that is not in it is looked up on the hub at its first use
    and written into the file at once, so that everyone who runs the same checkout later gets the
    same files. Delete its line to move to a newer commit.
    """

    def __init__(self, file: Path):
        self.file = file
        self.known: dict[str, str] = read_json(file, dict) if file.exists() else {}
        if not file.exists():
            self._write()

    def look_up(self, repo: str, newest: Callable[[], str]) -> str:
        """Return the commit of a repository; newest: asks the hub for that of its main branch."""
        if repo not in self.known:
            found = newest()
            if self.file.exists():  # what another stage has looked up since
                self.known = read_json(self.file, dict)
            self.known.setdefault(repo, found)
            echo(
                f"{repo}: no revision in the profile; {self.known[repo]} is now in {self.file}: "
                "commit that file"
            )
            self._write()
        return self.known[repo]

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, json.dumps(self.known, indent=1, sort_keys=True) + "\n")


def download_models(
    repos: Mapping[str, HubModel], revisions: Revisions, root: Path
) -> dict[str, dict]:
    """Download every model that is not in the cache yet; return the entries for a lock in `root`.

    repos: by the model's name in the section `models.repos`. UserError, saying what to do, if a
    licence is not accepted, a repo or revision does not exist, the disk is too small, or a file is
    not the published one; TransientError if the hub cannot be reached or the download breaks off.
    """
    return {
        name: _model(f"models.repos.{name}: {model.place}", model, revisions, root)
        for name, model in repos.items()
    }


def _model(what: str, model: HubModel, revisions: Revisions, root: Path) -> dict:
    if model.folder is not None:
        folder, files = files_of_folder(what, Path(model.folder), model.files)
        entry: dict[str, object] = {
            "folder": os.path.relpath(folder, root),
            "outside": True,
            "files": files,
        }
    else:
        folder, revision, files = download(what, model, revisions)
        entry = {"repo": model.repo, "revision": revision, "files": files}
    if model.variant or any(has_weights_alone(folder / file) for file in files):
        entry |= {"without_pickles": True} | ({"variant": model.variant} if model.variant else {})
        try:
            convert_pickles(folder, safe_folder(entry, model.variant), sorted(files), model.variant)
        except Exception as error:
            if is_full(error):
                raise UserError(_no_space(what, constants.HF_HOME)) from None
            raise
    return entry | ({"architecture": model.architecture} if model.architecture else {})


def fetch_published(
    name: str, settings: PublishedModel, root: Path, revisions: Revisions
) -> tuple[Path, dict]:
    """Return the folder of published or exported weights, and their entry for a lock in `root`.

    Errors as in `download`, and UserError if its folder does not exist. Nothing is copied: the
    files must stay in the folder.
    """
    where = f"published.{name}"
    if settings.repo:
        wanted = HubFiles(
            repo=settings.repo,
            revision=settings.revision,
            files=settings.files,
            sha256=settings.sha256,
        )
        named = "files" in settings.model_fields_set
        folder, revision, files = download(
            f"{where}: {settings.repo}", wanted, revisions, optional=() if named else ("*.json",)
        )
        entry: dict[str, object] = {"repo": settings.repo, "revision": revision, "files": files}
    else:
        folder, files = files_of_folder(
            f"{where}.folder", Path(settings.folder or ""), settings.files
        )
        entry = {"folder": os.path.relpath(folder, root), "files": files}
    return folder, entry


def files_of_folder(
    what: str, place: Path, patterns: Sequence[str]
) -> tuple[Path, dict[str, dict]]:
    """Return a folder of the user's, with size and hash of each file of these patterns.

    place: the folder, or a file, which counts with the JSON beside it; what: the setting. UserError
    if there is nothing of the kind.
    """
    if not place.exists():
        raise UserError(f"{what}: {place} does not exist")
    folder, wanted = (
        (place.parent, (place.name, "*.json")) if place.is_file() else (place, tuple(patterns))
    )
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if not (
        chosen := [name for name in names if any(fnmatch(name, pattern) for pattern in wanted)]
    ):
        raise UserError(f"{what}: {place} has no file {' or '.join(wanted)}")
    return folder, describe_files(folder, chosen)


def download(
    what: str,
    wanted: HubFiles,
    revisions: Revisions,
    repo_type: Literal["model", "dataset"] = "model",
    optional: Sequence[str] = (),
) -> tuple[Path, str, dict[str, dict]]:
    """Return the cache folder of a repository's files, its commit, and each file's size and hash.

    what: the setting and the repository, with which messages begin; optional: patterns that need no
    file. Errors as in `download_models`.
    """
    # Resolve the revision, check the disk, download what is missing
    patterns = list(wanted.files)
    try:
        newest = lambda: str(
            HfApi(endpoint=constants.ENDPOINT).repo_info(wanted.repo, repo_type=repo_type).sha
        )
        revision = wanted.revision or revisions.look_up(wanted.repo, newest)
        wanted = wanted.model_copy(update={"revision": revision})
        snapshot = partial(
            snapshot_download,
            wanted.repo,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=patterns,
        )
        if not constants.HF_HUB_OFFLINE:
            _check_disk(what, list(snapshot(dry_run=True)))
        folder = Path(snapshot())
    except (OSError, HTTPError) as error:
        raise explain_error(what, wanted, error, repo_type) from None
    # Every pattern has a file, and every file its published content
    files = describe_files(folder)
    files = {
        file: entry
        for file, entry in files.items()
        if any(fnmatch(file, pattern) for pattern in patterns)
    }
    for pattern in patterns:
        if pattern not in optional and not any(fnmatch(file, pattern) for file in files):
            raise UserError(f"{what} has no file {pattern} at revision {revision}")
    if unknown := sorted(wanted.sha256.keys() - files.keys()):
        raise UserError(
            f"{what}: sha256 names {unknown[0]}, which is not among its files at revision "
            f"{revision}"
        )
    for file, known in files.items():
        _check_content(what, folder / file, known["sha256"], wanted.sha256.get(file))
    return folder, revision, files


def explain_error(
    what: str, wanted: HubFiles, error: Exception, repo_type: str = "model"
) -> UserError:
    """Return an error that says in one line what the hub's client means, and what to do."""
    if constants.HF_HUB_OFFLINE:
        return UserError(
            f"{what} is not in the cache {constants.HF_HUB_CACHE}: "
            f"unset HF_HUB_OFFLINE and run again, {INSTEAD}"
        )
    # the client wraps the real error
    cause: BaseException = error
    while isinstance(cause, DryRunError | LocalEntryNotFoundError) and cause.__cause__ is not None:
        cause = cause.__cause__
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{wanted.repo}"
    if isinstance(cause, GatedRepoError):
        return UserError(
            f"{what} is gated: accept its licence at {page}, then run `hf auth login` or set "
            f"HF_TOKEN; {INSTEAD}"
        )
    if isinstance(cause, RevisionNotFoundError):
        return UserError(
            f"{what} has no revision {wanted.revision}: put a commit of {page}/commits/main into "
            "the profile"
        )
    if isinstance(cause, RepositoryNotFoundError) or status in (401, 403):
        return UserError(
            f"{what} does not exist, or is private: run `hf auth login` or set HF_TOKEN, "
            f"for an account that can see {page}"
        )
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return UserError(_no_space(what, constants.HF_HUB_CACHE))
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return TransientError(
        f"{what} could not be downloaded ({reason}): run again, complete files are kept (hub: "
        f"{constants.ENDPOINT}); {INSTEAD}"
    )


def _no_space(what: str, folder: str) -> str:
    return f"{what}: no space left in {folder}: make room or set HF_HOME elsewhere, and run again"


def _check_content(what: str, path: Path, sha256: str, pinned: str | None) -> None:
    """Check a file; UserError if it is not what the profile pins or the hub publishes.

    The cache names files by their hash.
    """
    published = path.resolve().name
    if re.fullmatch("[0-9a-f]{40}", published):  # a small file: git's hash of it
        content = path.read_bytes()
        actual_hash = hashlib.sha1(
            f"blob {len(content)}\0".encode() + content, usedforsecurity=False
        ).hexdigest()
    else:
        actual_hash = sha256 if re.fullmatch("[0-9a-f]{64}", published) else published
    for expected, actual in ((pinned, sha256), (published, actual_hash)):
        if expected not in (None, actual):
            raise UserError(
                f"{what}: {path} is damaged or not the published file "
                f"(hash {actual}, not {expected}): delete {path.resolve()} and run again"
            )


def _check_disk(what: str, files: list) -> None:
    """Check that the disk has room for missing files and converted pickles; UserError otherwise."""
    needed = sum(
        file.file_size * (2 if Path(file.filename).suffix in PICKLED else 1)
        for file in files
        if file.will_download
    )
    existing = next(
        folder
        for folder in [Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents]
        if folder.exists()
    )
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB free: "
            "make room or set HF_HOME elsewhere"
        )
