"""Published models: downloaded by repo and full revision into the Hugging Face cache, and checked."""

import shutil
from pathlib import Path

from .config import HubModel, HubModels
from .errors import UserError
from .model_store import describe_files


def download_models(settings: HubModels) -> dict[str, dict]:
    """Brings every model into the cache (what is there is not loaded again) and returns the lock entries.

    UserError, saying what to do, where a licence is not accepted, a repo or revision does not exist, the hub cannot be
    reached, the disk is too small, or a file is not the known one.
    """
    return {name: _download(name, model) for name, model in settings.repos.items()}


def _download(name: str, model: HubModel) -> dict:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"models.repos.{name}: {model.repo}"
    arguments = {"revision": model.revision, "allow_patterns": list(model.files)}
    try:
        if not constants.HF_HUB_OFFLINE:
            _check_disk(what, snapshot_download(model.repo, **arguments, dry_run=True))
        folder = Path(snapshot_download(model.repo, **arguments))
    except GatedRepoError:
        raise UserError(
            f"{what} is gated: accept its licence on the model's page, then `hf auth login` or set HF_TOKEN; or use profile tiny"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{what} has no revision {model.revision}; put an existing commit into the profile") from None
    except RepositoryNotFoundError:
        raise UserError(f"{what} does not exist, or is private and HF_TOKEN has no right to it") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{what} is not in the cache and could not be downloaded ({reason}); connect and run again, or use profile tiny"
        ) from None
    files = describe_files(folder)
    for file, expected in model.sha256.items():
        if file not in files:
            raise UserError(f"{what} has no file {file} at revision {model.revision}")
        if files[file]["sha256"] != expected:
            raise UserError(
                f"{what}: {folder / file} has SHA-256 {files[file]['sha256']}, not {expected}: delete it and run again"
            )
    entry = {"repo": model.repo, "revision": model.revision, "files": files}
    return entry | ({"architecture": model.architecture} if model.architecture else {})


def _check_disk(what: str, files: list) -> None:
    from huggingface_hub import constants

    needed = sum(file.file_size for file in files if file.will_download)
    existing = next(folder for folder in [Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB free: make room or set HF_HOME elsewhere"
        )
