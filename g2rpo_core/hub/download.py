"""Downloads models and data from the hub by full revision, checked and free of pickles.

A file is what the hub's list of its commit says: the SHA-256 of a large one, git's hash of a small
one. The names and links in the client's cache say nothing; their layout changes with its version.
"""

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from huggingface_hub import (
    DryRunFileInfo,
    HfApi,
    RepoFile,
    constants,
    get_token,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from huggingface_hub.utils.sha import git_hash

from g2rpo_core.foundation.errors import TransientError, UserError, attempt
from g2rpo_core.foundation.files import files_in, is_full, read_json, what_lacks, write_json
from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import safe_folder
from g2rpo_core.hub.pickled import convert_pickles, has_weights_alone
from g2rpo_core.hub.pretrained import refuse_quantized
from g2rpo_core.hub.settings import HubFiles, HubModel, Weights

INSTEAD = "or use profile tiny"
NO_SPACE = "no space left in {}: make room or set HF_HOME or HF_HUB_CACHE elsewhere, and run again"

# Committed: what was looked up on the hub, of models and of prompts
REVISIONS = Path("reports", "revisions")


def known_revisions(file: Path) -> dict[str, str]:
    """Return repository -> full commit of what a profile does not pin, from a committed JSON file.

    A repository that is not in it is looked up on the hub at its first use and written into it at
    once, so that everyone who runs the same checkout later gets the same files. Delete its line to
    move to a newer commit.
    """
    return read_json(file, dict) if file.exists() else {}


def _look_up(file: Path, repo: str, repo_type: str) -> str:
    """Return the commit of a repository: the known one, or that of its main branch on the hub."""
    known = known_revisions(file)
    commit = str(
        known[repo]
        if repo in known
        else HfApi(endpoint=constants.ENDPOINT).repo_info(repo, repo_type=repo_type).sha
    )
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise (UserError if repo in known else TransientError)(
            f"{repo}: {commit[:60]!r} is no full commit, in "
            f"{f'{file}: correct it' if repo in known else 'the answer of the hub: run again'}"
        )
    if repo not in known:
        known = {repo: commit} | known_revisions(file)  # what another stage has looked up since
        echo(
            f"{repo}: no revision in the profile; {known[repo]} is now in {file}: commit that file"
        )
        write_json(file, dict(sorted(known.items())))
    return known[repo]


def download_models(repos: Mapping[str, HubModel], revisions: Path, root: Path) -> dict[str, dict]:
    """Download every model that is not in the cache yet; return the entries for a lock in `root`.

    repos: by the model's name in the section `models.repos`; revisions: see `known_revisions`.
    UserError, saying what to do, if a licence is not accepted, a repo or revision does not exist,
    the disk is too small, or a file is not the published one; TransientError if the hub cannot be
    reached or the download breaks off.
    """
    return {
        name: _model(f"models.repos.{name}", model, revisions, root)
        for name, model in repos.items()
    }


def _model(where: str, model: HubModel, revisions: Path, root: Path) -> dict:
    folder, entry = fetch(where, model, revisions, root)
    entry |= {"outside": True} if model.folder is not None else {}
    files = sorted(entry["files"])
    if model.variant or any(has_weights_alone(file, files) for file in files):
        entry |= {"without_pickles": True} | ({"variant": model.variant} if model.variant else {})
        try:
            convert_pickles(folder, safe_folder(entry, model.variant), files, model.variant)
        except Exception as error:
            if is_full(error):
                raise UserError(
                    f"{where}: {model.place}: {NO_SPACE.format(constants.HF_HOME)}"
                ) from None
            raise
    return entry | ({"architecture": model.architecture} if model.architecture else {})


def fetch(where: str, model: Weights, revisions: Path, root: Path) -> tuple[Path, dict]:
    """Return the folder of a model's files, and their entry for a lock in `root`.

    where: the setting. Files in a folder of the user's are not copied, and must stay there. Errors
    as in `download_models`, and UserError if that folder does not exist.
    """
    what = f"{where}: {model.place}"
    if model.folder is not None:
        folder, files = files_of_folder(what, Path(model.folder), model.files)
        return folder, {"folder": os.path.relpath(folder, root), "files": files}
    folder, revision, files = download(
        what,
        model,
        revisions,
        optional=() if "files" in model.model_fields_set else ("*.json",),
    )
    return folder, {"repo": model.repo, "revision": revision, "files": files}


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
        (place.parent, [place.name.replace("[", "[[]"), "*.json"])
        if place.is_file()
        else (place, list(patterns))
    )
    # Without the notes of the client, which may have downloaded into this folder
    files = filter_repo_objects(
        files_in(folder), allow_patterns=wanted, ignore_patterns=DEFAULT_IGNORE_PATTERNS
    )
    if not (described := describe_files(folder, files)):
        raise UserError(f"{what}: {place} has no file {' or '.join(wanted)}")
    return folder, described


def download(
    what: str,
    wanted: HubFiles,
    revisions: Path,
    repo_type: Literal["model", "dataset"] = "model",
    optional: Sequence[str] = (),
) -> tuple[Path, str, dict[str, dict]]:
    """Return the cache folder of a repository's files, its commit, and what is known of each file.

    That is its size, its SHA-256 and, as `published`, the hash that the hub's list of the commit
    gives. what: the setting and the repository, with which messages begin; optional: patterns that
    need no file. Errors as in `download_models`.
    """
    cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=wanted.repo, repo_type=repo_type))
    handlers = {
        number: signal.signal(number, _stop)
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()  # no other may
    }
    try:
        revision = wanted.revision or _look_up(revisions, wanted.repo, repo_type)
        wanted = wanted.model_copy(update={"revision": revision})
        commit: dict[str, Any] = {"repo_type": repo_type, "revision": revision}
        snapshot: Callable[..., Any] = partial(
            snapshot_download, wanted.repo, allow_patterns=list(wanted.files), **commit
        )
        # What can be refused is refused before gigabytes are downloaded
        published = published_hashes(cache, wanted.repo, **commit)
        names = published or dict.fromkeys(files_in(Path(snapshot())), "")
        chosen = _choose(what, wanted, names, optional)
        if published is not None and not constants.HF_HUB_OFFLINE:
            _check_disk(what, cache, snapshot(dry_run=True), published)
        for config in filter_repo_objects(chosen, allow_patterns=["config.json", "*/config.json"]):
            refuse_quantized(
                Path(hf_hub_download(wanted.repo, config, **commit)), f"{what}: {config}"
            )
        folder = Path(snapshot())
        files = describe_files(folder, chosen)
        expected = (published or {}) | dict(wanted.sha256)
        for name in sorted(files.keys() & expected.keys()):
            files[name]["published"] = expected[name].lower()
            _check_published(what, cache, folder / name, files[name], name in wanted.sha256)
    except UserError:
        raise
    # The client passes on what it meets in an answer, and of Xet storage a bare RuntimeError
    except Exception as error:
        raise explain_error(what, wanted, error, repo_type) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if unchecked := sorted(files.keys() - expected.keys()):
        echo(
            f"warning: {what}: offline, and the cache has no list of revision {revision}: nothing "
            f"says whether {', '.join(unchecked)} are as published, or all: start once without "
            "HF_HUB_OFFLINE, or pin their sha256",
            file=sys.stderr,
        )
    if unfinished := _unfinished(cache):
        echo(f"{what}: {unfinished}")
    return folder, revision, files


def _stop(*_: object) -> NoReturn:
    """End this process at once: the client would wait for its threads to finish their files."""
    # Not by print, which this signal may have interrupted
    os.write(2, b"\nerror: stopped; complete files are kept, and the same command goes on\n")
    os._exit(128 + signal.SIGTERM)


def published_hashes(
    cache: Path, repo: str, repo_type: str, revision: str
) -> dict[str, str] | None:
    """Return by file the hash that the hub's list of a commit gives; None if it cannot be asked.

    That is the SHA-256 of a large file, and git's SHA-1 of a small one. cache: the repository's
    folder in the cache of the hub's client, which keeps the lists that it has asked for as JSON
    (huggingface_hub/_tree_cache.py; tests/hub/test_client.py).
    """
    listed = lambda: {
        name: str(file.get("lfs_sha256") or file["blob_id"])
        for name, file in read_json(cache / "trees" / f"{revision}.json", dict)["files"].items()
    }
    cached = attempt(listed, (UserError, KeyError, TypeError, AttributeError))[0]
    if cached is not None or constants.HF_HUB_OFFLINE:
        return cached
    tree = HfApi(endpoint=constants.ENDPOINT).list_repo_tree(
        repo, recursive=True, repo_type=repo_type, revision=revision
    )
    return {
        file.path: file.lfs.sha256 if file.lfs else file.blob_id
        for file in tree
        if isinstance(file, RepoFile)
    }


def _choose(
    what: str, wanted: HubFiles, published: Mapping[str, str], optional: Sequence[str]
) -> list[str]:
    """Return the files of the patterns; UserError for a pattern or a pinned hash that fits none."""
    chosen = list(filter_repo_objects(published, allow_patterns=list(wanted.files)))
    where = f"at revision {wanted.revision}" + (
        " in this cache: correct it, or unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else ""
    )
    for pattern in wanted.files:
        if pattern not in optional and not any(filter_repo_objects(chosen, allow_patterns=pattern)):
            raise UserError(f"{what} has no file {pattern} {where}")
    for name, pinned in wanted.sha256.items():
        if name not in chosen:
            raise UserError(f"{what}: sha256 names {name}, which is not among its files {where}")
        if len(published[name]) == 64 and published[name] != pinned.lower():
            raise UserError(
                f"{what}: {name} is not the published file that the profile pins (sha256 "
                f"{published[name]}, not {pinned}): correct sha256 or the revision"
            )
    return chosen


def explain_error(
    what: str, wanted: HubFiles, error: Exception, repo_type: str = "model"
) -> UserError:
    """Return an error that says in one line what the hub's client means, and what to do."""
    # the client wraps the real error
    cause: BaseException = error
    while isinstance(cause, DryRunError | LocalEntryNotFoundError) and cause.__cause__ is not None:
        cause = cause.__cause__
    page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{wanted.repo}"
    login = (
        "unset HF_HUB_DISABLE_IMPLICIT_TOKEN, with which no token is sent"
        if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN and get_token()
        else "run `hf auth login` or set HF_TOKEN"
    )
    problems: dict[type[BaseException], str] = {
        OfflineModeIsEnabled: f"is not in the cache {constants.HF_HUB_CACHE}: "
        f"unset HF_HUB_OFFLINE and run again, {INSTEAD}",
        GatedRepoError: f"is gated: accept its licence at {page}, then {login}; {INSTEAD}",
        RevisionNotFoundError: f"has no revision {wanted.revision}: "
        f"put a commit of {page}/commits/main into the profile",
        RepositoryNotFoundError: f"does not exist, or is private: {login}, "
        f"for an account that can see {page}",
    }
    if problem := problems.get(type(cause)):
        return UserError(f"{what} {problem}")
    # An address in it may have been signed
    reason = " ".join(re.sub(r"\?\S+", "", str(cause)).split())[:200]
    # By the hub itself, for good, and not by its storage
    if (
        isinstance(cause, HfHubHTTPError)
        and 400 <= cause.response.status_code < 500
        and cause.response.status_code not in (408, 425, 429)
        and str(cause.response.url).startswith(constants.ENDPOINT)
    ):
        return UserError(
            f"{what} is refused ({reason}): see {page}, and {login} for an account and a token "
            f"that may read it; {INSTEAD}"
        )
    lacks = (
        NO_SPACE.format(constants.HF_HUB_CACHE)
        if is_full(cause)
        else what_lacks(cause)
        or (isinstance(cause, OSError) and cause.filename and f"{cause.filename}: {cause.strerror}")
    )
    # Of this machine, and not of the server's text
    if lacks and not isinstance(cause, HfHubHTTPError):
        return UserError(f"{what}: {lacks}")
    return TransientError(
        f"{what} could not be downloaded ({type(cause).__name__}: {reason}): run again"
        # hf_xet raises no other
        f"{', or with HF_HUB_DISABLE_XET=1' if isinstance(cause, RuntimeError) else ''}; "
        f"complete files are kept (hub: {constants.ENDPOINT}); {INSTEAD}"
    )


def _check_published(
    what: str, cache: Path, path: Path, about: Mapping[str, Any], pinned: bool
) -> None:
    """Check a file's hash; UserError, with what to delete, if it is not the published one.

    Where the cache has no links, a file may be a copy of one in `blobs`, and be made from it again.
    pinned: the profile names the hash.
    """
    published = about["published"]
    actual = about["sha256"] if len(published) == 64 else git_hash(path.read_bytes())
    if actual != published:
        sources = {path.resolve(), (cache / "blobs" / published).resolve()}
        delete = " and ".join(sorted(str(source) for source in sources if source.exists()))
        raise UserError(
            f"{what}: {path} is damaged or not the published file "
            f"(hash {actual}, not {published}): delete {delete} and run again"
            f"{', or correct sha256 in the profile' if pinned else ''}"
        )


def _unfinished(cache: Path) -> str:
    """Say what killed downloads of a repository left; the client goes on from none of it."""
    count = len(list(cache.glob("blobs/*.incomplete")))
    return (
        f"{count} unfinished downloads, of starts that were killed or still run: "
        f"rm '{cache}'/blobs/*.incomplete, if none runs"
        if count
        else ""
    )


def _check_disk(
    what: str, cache: Path, files: Sequence[DryRunFileInfo], published: Mapping[str, str]
) -> None:
    """Check that the disk has room for missing files and converted pickles; UserError otherwise."""
    # By content: the client downloads once what two files share
    sizes = {
        published[file.filename]: (file.file_size or 0)
        * (2 if has_weights_alone(file.filename, [other.filename for other in files]) else 1)
        for file in files
        if file.will_download
    }
    needed = sum(sizes.values())
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        advice = filter(
            None, ["make room or set HF_HOME or HF_HUB_CACHE elsewhere", _unfinished(cache)]
        )
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB free: "
            f"{'; '.join(advice)}"
        )
