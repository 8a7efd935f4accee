"""Published models and data: downloaded by repo and full revision into the Hugging Face cache, checked, and free of pickles."""

import errno
import hashlib
import re
import shutil
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal

from g2rpo_core.common.model_store import describe_files, safe_folder
from g2rpo_core.errors import TransientError, UserError
from g2rpo_core.files import is_full
from g2rpo_core.hub.conversion import PICKLED, without_pickles
from g2rpo_core.hub.revisions import Revisions
from g2rpo_core.hub.settings import HubFiles, HubModel, HubModels

INSTEAD = "or use profile tiny"


def download_models(settings: HubModels, revisions: Revisions) -> dict[str, dict]:
    """Downloads every model that is not in the cache yet, and returns the lock entries.

    UserError, saying what to do, if a licence is not accepted, a repo or revision does not exist, the disk is too small, or a
    file is not the published one; TransientError if the hub cannot be reached or the download breaks off.
    """
    return {name: _model(f"models.repos.{name}: {model.repo}", model, revisions) for name, model in settings.repos.items()}


def _model(what: str, model: HubModel, revisions: Revisions) -> dict:
    from huggingface_hub import constants

    folder, revision, files = download(what, model, revisions)
    entry: dict[str, object] = {"repo": model.repo, "revision": revision, "files": files}
    if any(Path(file).suffix in PICKLED for file in files):
        entry["without_pickles"] = True
        try:
            without_pickles(folder, safe_folder(entry))
        except Exception as error:
            if is_full(error):
                raise UserError(_no_space(what, constants.HF_HOME)) from None
            raise
    return entry | ({"architecture": model.architecture} if model.architecture else {})


def download(
    what: str, wanted: HubFiles, revisions: Revisions, repo_type: Literal["model", "dataset"] = "model"
) -> tuple[Path, str, dict[str, dict]]:
    """The cache folder with a repository's files, its commit, and each file's size and hash; errors as in `download_models`.

    what: the setting and the repository, with which messages begin.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, constants, snapshot_download

    patterns = list(wanted.files)
    try:
        newest = lambda: str(HfApi(endpoint=constants.ENDPOINT).repo_info(wanted.repo, repo_type=repo_type).sha)
        revision = wanted.revision or revisions.of(wanted.repo, newest)
        wanted = wanted.model_copy(update={"revision": revision})
        snapshot = partial(snapshot_download, wanted.repo, repo_type=repo_type, revision=revision, allow_patterns=patterns)
        if not constants.HF_HUB_OFFLINE:
            _check_disk(what, list(snapshot(dry_run=True)))
        folder = Path(snapshot())
    except (OSError, HTTPError) as error:
        raise explained(what, wanted, error, repo_type) from None
    files = describe_files(folder)
    files = {file: about for file, about in files.items() if any(fnmatch(file, pattern) for pattern in patterns)}
    for pattern in patterns:
        if not any(fnmatch(file, pattern) for file in files):
            raise UserError(f"{what} has no file {pattern} at revision {revision}")
    for file, known in files.items():
        _check_content(what, folder / file, known["sha256"], wanted.sha256.get(file))
    return folder, revision, files


def explained(what: str, wanted: HubFiles, error: Exception, repo_type: str = "model") -> UserError:
    """What an error of the hub's client means and what to do, in one line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        return UserError(f"{what} is not in the cache {constants.HF_HUB_CACHE}: unset HF_HUB_OFFLINE and run again, {INSTEAD}")
    cause: BaseException = error
    while isinstance(cause, DryRunError | LocalEntryNotFoundError) and cause.__cause__ is not None:
        cause = cause.__cause__  # the client wraps the real error
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{wanted.repo}"
    if isinstance(cause, GatedRepoError):
        return UserError(f"{what} is gated: accept its licence at {page}, then run `hf auth login` or set HF_TOKEN; {INSTEAD}")
    if isinstance(cause, RevisionNotFoundError):
        return UserError(f"{what} has no revision {wanted.revision}: put a commit of {page}/commits/main into the profile")
    if isinstance(cause, RepositoryNotFoundError) or status in (401, 403):
        return UserError(
            f"{what} does not exist, or is private: run `hf auth login` or set HF_TOKEN, for an account that can see {page}"
        )
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return UserError(_no_space(what, constants.HF_HUB_CACHE))
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return TransientError(
        f"{what} could not be downloaded ({reason}): run again, complete files are kept (hub: {constants.ENDPOINT}); {INSTEAD}"
    )


def _no_space(what: str, folder: str) -> str:
    return f"{what}: no space left in {folder}: make room or set HF_HOME elsewhere, and run again"


def _check_content(what: str, path: Path, sha256: str, pinned: str | None) -> None:
    """Checks a file; UserError if it is not what the profile pins or the hub publishes (the cache names files by their hash)."""
    published = path.resolve().name
    if re.fullmatch("[0-9a-f]{40}", published):  # a small file: git's hash of it
        content = path.read_bytes()
        actual_hash = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
    else:
        actual_hash = sha256 if re.fullmatch("[0-9a-f]{64}", published) else published
    for expected, actual in ((pinned, sha256), (published, actual_hash)):
        if expected not in (None, actual):
            raise UserError(
                f"{what}: {path} is damaged or not the published file (hash {actual}, not {expected}): "
                f"delete {path.resolve()} and run again"
            )


def _check_disk(what: str, files: list) -> None:
    """Checks that the disk has room for the missing files and for converting pickled checkpoints; UserError otherwise."""
    from huggingface_hub import constants

    needed = sum(file.file_size * (2 if Path(file.filename).suffix in PICKLED else 1) for file in files if file.will_download)
    existing = next(folder for folder in [Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB free: make room or set HF_HOME elsewhere"
        )
