"""What the locked hub's client keeps on the disk, and that none of it passes for a hash.

The client promises neither the form of its lists nor the layout of its cache. If a new version
fails here, look at `g2rpo_core/hub/download.py`: at `published_hashes` for the lists, and at
`_check_published` for what it tells people to delete.
"""

import itertools
import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.download import download
from g2rpo_core.hub.settings import HubFiles

REVISION = "0123456789abcdef0123456789abcdef01234567"
CONTENT = {"config.json": b'{"layers": 2}', "vae/model.safetensors": bytes(range(256)) * 500}
CHANGED = (
    f"huggingface_hub {huggingface_hub.__version__} keeps other files: look at hub/download.py"
)
# Constants of the client, and where the cache has a large file then
LAYOUTS = {
    "a store of all repositories": ({}, "blobs/??/*"),
    "blobs, by HTTP": ({"HF_HUB_DISABLE_XET": True}, "models--*/blobs/*"),
    "no links": ({"HF_HUB_DISABLE_SYMLINKS": True}, "models--*/snapshots/*/vae/*"),
}


@pytest.fixture
def files(hub, tmp_path):
    """files(**changes) -> the locked files of a model with a small file and a large one."""
    for name, content in CONTENT.items():
        path = tmp_path / "published" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    hub.add("somebody/images", REVISION, tmp_path / "published")

    def fetch(**changes):
        wanted = {"repo": "somebody/images", "revision": REVISION, "files": ["*"], **changes}
        settings = HubFiles.model_validate_json(json.dumps(wanted))
        return download("model", settings, tmp_path / "revisions.json")[2]

    return fetch


def cached(file: str, revision: str = REVISION) -> Path:
    return next(Path(constants.HF_HUB_CACHE).glob(f"*/snapshots/{revision}/{file}"))


def damage(path: Path, ending: bytes = b"?") -> None:
    """Change the end; what has the same length the client takes for whole."""
    path.resolve().chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + ending)


def delete_what_is_named(files, **changes) -> None:
    with pytest.raises(UserError, match="is damaged or not the published file") as error:
        files(**changes)
    named = str(error.value).rpartition(": delete ")[2].removesuffix(" and run again")
    for path in named.split(" and "):
        Path(path).unlink()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_what_the_hub_publishes_in_any_layout(files, monkeypatch, layout):
    """What is damaged is named with what to delete, and then the next start downloads it."""
    switches, pattern = LAYOUTS[layout]
    for name, value in switches.items():
        monkeypatch.setattr(constants, name, value)
    whole = files()
    path = cached("vae/model.safetensors").resolve()
    assert path.relative_to(Path(constants.HF_HUB_CACHE).resolve()).match(pattern), CHANGED
    for (file, content), ending in itertools.product(CONTENT.items(), (b"?", b"")):
        damage(cached(file), ending)
        delete_what_is_named(files)
        assert files() == whole and cached(file).read_bytes() == content
