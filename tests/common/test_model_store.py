"""A lock of two small files, and what is said of a folder that is not what its lock says."""

import json
from pathlib import Path

import pytest

from g2rpo_core.common.model_store import LOCK, ModelStore, describe_files, write_lock
from g2rpo_core.foundation.errors import UserError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Models of which `scorer` is in a folder beside the lock."""
    monkeypatch.chdir(tmp_path)
    root = Path("models", "tiny")
    folder = root / "scorer" / "inner"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    (folder.parent / "config.json").write_text("{}")
    write_lock(root, {"scorer": {"folder": "scorer", "files": describe_files(root / "scorer")}})
    return root


def test_a_folder_that_is_what_its_lock_says_is_given_out(root):
    assert ModelStore(root).folder("scorer") == root / "scorer"
    assert set(ModelStore(root).entry("scorer")["files"]) == {"config.json", "inner/weights"}


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"123", "inner/weights has 3 of 5 bytes"), (b"54321", "inner/weights has changed"), (None, "inner/weights is gone")],
)
def test_a_file_that_is_not_the_locked_one_is_named_with_what_to_do(root, content, said):
    file = root / "scorer" / "inner" / "weights"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=f"{said}.*dvc repro models"):
        ModelStore(root).folder("scorer")


def test_a_model_that_the_lock_lacks_is_refused_with_those_it_has(root):
    with pytest.raises(UserError, match="has no model 'other', only scorer"):
        ModelStore(root).folder("other")


@pytest.mark.parametrize("path", ["../outside", "/outside"])
def test_a_lock_cannot_lead_out_of_its_folder(root, path):
    (root / LOCK).write_text(json.dumps({"scorer": {"folder": path, "files": {}}}))
    with pytest.raises(UserError, match="would lead out of its folder"):
        ModelStore(root).folder("scorer")
    assert str(ModelStore(root, "published").entry("scorer")["folder"]) == path  # of `published`, the user names the folder


def test_without_a_lock_the_stage_that_makes_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the stage `models` makes it"):
        ModelStore(Path("models", "tiny")).entry("scorer")
