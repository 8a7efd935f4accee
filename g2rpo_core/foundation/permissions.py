"""Keeps to the umask what others may read, and says who can let this user read a file."""

import os
from pathlib import Path

from g2rpo_core.foundation.errors import attempt


def who_may(error: PermissionError, path: Path) -> str:
    """Say who can let this user read a file or folder: the owner of it or of one above it."""
    file = Path(error.filename or path).absolute()
    above = [folder for folder in reversed(file.parents) if not os.access(folder, os.X_OK)]
    shut = (*above, file)[0]
    owner = attempt(shut.owner, (OSError, KeyError))[0] or "its owner"
    what = "it" if shut == path.absolute() else shut
    return f"{owner} can let you read {what}, with chmod -R g+rX or a umask of 0002"


def share_weights(folder: Path) -> None:
    """Let those who may read a new folder read its weights; safetensors writes for the owner alone.

    The umask has decided the folders' modes. Only of what was just written: a hard link's mode is
    that of all its names.
    """
    for file in (path for path in folder.rglob("*.safetensors") if not path.is_symlink()):
        file.chmod(file.parent.stat().st_mode & 0o666)
