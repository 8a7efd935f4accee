"""A lock of two small files, and what is said of a folder that is not what its lock says."""

import json
import re
from pathlib import Path

import pytest

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.hub.model_store import LOCK, ModelStore, write_lock
from stages import embed
from tests.conftest import ROOT
from tests.fixtures.commands import refusal


@pytest.fixture
def root(here):
    """Models of which `scorer` is in a folder beside the lock."""
    root = Path("models", "tiny")
    folder = root / "scorer" / "inner"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    (folder.parent / "config.json").write_text("{}")
    write_lock(root, {"scorer": {"folder": "scorer", "files": describe_files(root / "scorer")}})
    return root


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"54321", "inner/weights has changed"),
        (None, "inner/weights is gone"),
    ],
)
def test_a_file_that_is_not_the_locked_one_is_named_with_what_to_do(root, content, said):
    file = root / "scorer" / "inner" / "weights"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=f"{said}.*dvc repro models"):
        ModelStore(root).folder("scorer")


def test_a_lock_cannot_lead_out_of_its_folder(root):
    path = "../outside"
    (root / LOCK).write_text(json.dumps({"scorer": {"folder": path, "files": {}}}))
    with pytest.raises(UserError, match="would lead out of its folder"):
        ModelStore(root).folder("scorer")
    assert (
        str(ModelStore(root, "published").entry("scorer")["folder"]) == path
    )  # of `published`, the user names the folder


def test_models_of_a_published_size_are_not_run_on_a_cpu_by_accident(tmp_path, monkeypatch):
    """Before anything is loaded: of these models there is only the lock."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    files = {"transformer/diffusion_pytorch_model.safetensors": {"size": 24 * 2**30, "sha256": "0"}}
    write_lock(
        tmp_path / "models" / "flux_hps_clip",
        {"pipeline": {"repo": "a/b", "revision": "0", "files": files}},
    )
    told = refusal(embed.main, "--profile", "flux_hps_clip", folder=tmp_path)
    assert re.search("the pipeline has 24 GiB.*finds no GPU here.*G2RPO_ON_CPU=1", told)
