"""Published or exported weights to evaluate beside the runs: finds them, checks them, and writes their lock."""

import os
from pathlib import Path

from g2rpo_core.common.model_store import describe_files, write_lock
from g2rpo_core.errors import UserError
from g2rpo_core.hub.download import download
from g2rpo_core.hub.revisions import Revisions
from g2rpo_core.hub.settings import HubFiles, PublishedModel


def fetch_published(name: str, settings: PublishedModel, root: Path, revisions: Revisions) -> None:
    """Writes the lock of one model into the folder `root`, for `ModelStore(root).folder(name)`; errors as in `download`.

    UserError if its folder does not exist. Nothing is copied: the files must stay in the folder.
    """
    where = f"published.{name}"
    if settings.repo:
        wanted = HubFiles(repo=settings.repo, revision=settings.revision, files=settings.files, sha256=settings.sha256)
        _, revision, files = download(f"{where}: {settings.repo}", wanted, revisions)
        entry: dict[str, object] = {"repo": settings.repo, "revision": revision, "files": files}
    else:
        folder = Path(settings.folder or "")
        if not folder.is_dir():
            raise UserError(
                f"{where}.folder: {folder} is not a folder; give one with a transformer or a LoRA, as `g2rpo export` writes it"
            )
        entry = {"folder": os.path.relpath(folder, root), "files": describe_files(folder)}
    write_lock(root, {name: entry})
