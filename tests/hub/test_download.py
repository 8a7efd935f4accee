"""Published models from a hub on loopback by the true client, and every way to fail."""

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.hub import download as hub_module
from g2rpo_core.hub.download import download_models
from g2rpo_core.hub.model_store import ModelStore, write_lock
from g2rpo_core.hub.pretrained import load_whole
from g2rpo_core.hub.settings import HubModels
from tests.fixtures.errors import refused

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPO = "somebody/images"
TENSORS = {"weight": torch.arange(30000.0).reshape(100, 300), "bias": torch.ones(3)}


@pytest.fixture
def hub(hub, tmp_path):
    """A hub with one model: small file, safetensors, pickled checkpoint, one not asked for."""
    folder = tmp_path / "published"
    (folder / "vae").mkdir(parents=True)
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "notes.txt").write_text("not asked for")
    save_file(TENSORS, folder / "vae" / "model.safetensors")
    shared = {"weight": TENSORS["weight"], "tied": TENSORS["weight"][:50].T}
    torch.save({"state_dict": shared, "epoch": 3}, folder / "scorer.pt")
    hub.add(REPO, REVISION, folder)
    hub.folder = folder
    return hub


def fetch(settings: HubModels) -> dict[str, dict]:
    home = Path(constants.HF_HOME)
    return download_models(settings.repos, home / "revisions.json", home)


def models(**changes) -> HubModels:
    files = ["config.json", "vae/*", "scorer.pt"]
    model = {"repo": REPO, "revision": REVISION, "files": files} | changes
    return HubModels.model_validate_json(
        json.dumps({"source": "hub", "repos": {"pipeline": model}})
    )


def refusal(settings: HubModels, error_type: type[UserError] = UserError) -> str:
    with pytest.raises(error_type) as error:
        fetch(settings)
    assert type(error.value) is error_type
    message = str(error.value)
    assert (
        message.startswith(f"models.repos.pipeline: {settings.repos['pipeline'].repo}")
        and "\n" not in message
    )
    return message


def test_a_model_is_downloaded_locked_and_read_offline(hub, tmp_path, monkeypatch):
    entry = fetch(models())["pipeline"]
    sha256 = hashlib.sha256((hub.folder / "scorer.pt").read_bytes()).hexdigest()
    of_git = hashlib.sha1(b'blob 13\0{"layers": 2}').hexdigest()
    assert set(entry["files"]) == {"config.json", "vae/model.safetensors", "scorer.pt"}
    assert entry["files"]["scorer.pt"]["sha256"] == sha256
    assert entry["files"]["scorer.pt"]["published"] == sha256
    assert entry["files"]["config.json"]["published"] == of_git
    write_lock(tmp_path / "models", {"pipeline": entry})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = ModelStore(tmp_path / "models").folder("pipeline")
    assert (folder / "config.json").read_text() == '{"layers": 2}'
    assert torch.equal(load_file(folder / "vae" / "model.safetensors")["weight"], TENSORS["weight"])
    hub.asked.clear()
    assert fetch(models())["pipeline"] == entry and hub.asked == []


def test_a_pickled_checkpoint_becomes_safetensors_once(hub, tmp_path):
    entry = fetch(models())["pipeline"]
    write_lock(tmp_path / "models", {"pipeline": entry})
    folder = ModelStore(tmp_path / "models").folder("pipeline")
    assert not (folder / "scorer.pt").exists()
    weights = load_file(folder / "scorer.safetensors")
    assert torch.equal(weights["weight"], TENSORS["weight"]) and torch.equal(
        weights["tied"], TENSORS["weight"][:50].T
    )
    made = os.stat(folder / "scorer.safetensors")
    fetch(models())
    assert os.stat(folder / "scorer.safetensors") == made
    content = (folder / "scorer.safetensors").read_bytes()
    (folder / "scorer.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    fetch(models())
    assert (folder / "scorer.safetensors").read_bytes() == content
    shutil.rmtree(folder)
    with refused("is gone, or has no .*: make it again with `dvc repro --force --single-item"):
        ModelStore(tmp_path / "models").folder("pipeline")


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"weight": TENSORS["weight"], "hook": Path("anything")},
            "scorer.pt: is damaged or holds more than weights",
        ),
        ({"weight": TENSORS["weight"], "name": "x"}, "scorer.pt: name is not a tensor but a str"),
    ],
)
def test_a_checkpoint_that_is_more_than_weights_is_refused_by_name(hub, content, message):
    torch.save(content, hub.folder / "scorer.pt")
    with refused(message):
        fetch(models())


@pytest.mark.parametrize("token, unsent", [("of-another-account", False), ("right", True)])
def test_a_gated_repo_says_where_its_licence_is(hub, monkeypatch, token, unsent):
    hub.repos[REPO].licensed = "right"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", unsent)
    monkeypatch.setenv("HF_TOKEN", token)
    login = (
        "unset HF_HUB_DISABLE_IMPLICIT_TOKEN"
        if unsent
        else "run `hf auth login` or set HF_TOKEN; or use profile tiny"
    )
    said = f"is gated: accept its licence at {hub.url}/{REPO}, then {login}"
    assert said in refusal(models())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"revision": "f" * 40}, f"has no revision {'f' * 40}: put a commit of "),
        ({"repo": "somebody/else"}, "does not exist, or is private: run `hf auth login`"),
        ({"files": ["config.json", "weights.bin"]}, "has no file weights.bin at revision"),
        (
            {"sha256": {"vae/model.safetensors": "0" * 64}},
            f"vae/model.safetensors is not the published file that .*, not {'0' * 64}.*: correct",
        ),
        # A mistyped name would leave the weights unchecked
        (
            {"sha256": {"vae/Model.safetensors": "0" * 64}},
            "sha256 names vae/Model.safetensors, which is not among its files",
        ),
    ],
)
def test_what_is_not_as_published_is_named(hub, changes, message):
    assert re.search(message, refusal(models(**changes)))
    assert hub.ranges == []


@pytest.mark.parametrize("hub_is", ["away", "a page", "without a commit"])
def test_a_hub_that_does_not_answer_may_answer_later(hub, monkeypatch, hub_is):
    """A page is what a captive portal or a proxy answers."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.page = b"<html>" if hub_is == "a page" else None
    hub.head = "None" if hub_is == "without a commit" else None
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE") if hub_is == "away" else ():
        address = getattr(constants, name).replace(hub.url, "http://127.0.0.1:9")
        monkeypatch.setattr(constants, name, address)
    with refused(f"{REPO}.*: run again", TransientError):
        fetch(models(revision=None))
    assert not Path(constants.HF_HOME, "revisions.json").exists()


def test_a_full_disk_is_seen_before_anything_is_loaded(hub, monkeypatch):
    """What two files share is downloaded once."""
    usage = shutil.disk_usage("/")._replace(free=200_000)
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage)
    assert "GB free: make room or set HF_HOME or HF_HUB_CACHE elsewhere" in refusal(models())
    assert hub.ranges == []
    shutil.copy(hub.folder / "vae" / "model.safetensors", hub.folder / "vae" / "same.safetensors")
    save_file({"weight": torch.ones(1)}, hub.folder / "model.safetensors")
    hub.add(REPO, REVISION, hub.folder)
    # A pickle is converted whatever else is there, and so needed twice
    assert "GB free" in refusal(models(files=["scorer.pt"]))
    fetch(models(files=["vae/"]))
    assert len(hub.ranges) == 1


def test_quantized_weights_are_refused_before_they_are_downloaded_or_loaded(hub):
    config = hub.folder / "text_encoder" / "config.json"
    config.parent.mkdir()
    config.write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    save_file(TENSORS, config.with_name("model.safetensors"))
    hub.add(REPO, REVISION, hub.folder)
    assert "text_encoder/config.json: its weights are quantized" in refusal(models(files=["*"]))
    assert {path for path, _ in hub.ranges} == {"config.json", "text_encoder/config.json"}
    with refused("text_encoder: its weights are quantized: name those that are not"):
        load_whole(transformers.AutoModel, config.parent)


def test_a_revision_that_is_not_pinned_is_looked_up_once_and_kept(hub, capsys):
    unpinned = models(revision=None)
    lock = Path(constants.HF_HOME, "revisions.json")
    entry = fetch(unpinned)["pipeline"]
    assert entry["revision"] == REVISION and json.loads(lock.read_text()) == {REPO: REVISION}
    assert str(lock) in capsys.readouterr().out
    hub.head = "f" * 40  # the branch moves on
    assert fetch(unpinned)["pipeline"] == entry and capsys.readouterr().out == ""
    lock.write_text("{}")
    assert "has no revision ffff" in refusal(
        unpinned
    )  # looked up again; this hub has the files of one revision alone


def test_a_model_in_a_folder_is_locked_and_nothing_is_copied(tmp_path):
    """Without a hub; only the files that were asked for are looked at."""
    folder = tmp_path / "mine"
    (folder / "vae").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "optimizer.safetensors").write_bytes(b"of no use")
    save_file(TENSORS, folder / "vae" / "model.safetensors")
    in_a_folder = {"repo": None, "revision": None, "files": ["*.json", "vae/"]}
    mine = models(**in_a_folder, folder=str(folder))
    root = tmp_path / "models" / "mine"
    write_lock(root, download_models(mine.repos, tmp_path / "revisions.json", root))
    found = ModelStore(root).folder("pipeline")
    assert found.samefile(folder) and set(ModelStore(root).entry("pipeline")["files"]) == {
        "config.json",
        "vae/model.safetensors",
    }
    gone = models(**in_a_folder, folder="nowhere")
    with refused("models.repos.pipeline: nowhere: nowhere does not exist"):
        download_models(gone.repos, tmp_path / "revisions.json", root)
    with pytest.raises(ValueError, match="needs either `repo` or `folder`"):
        models(folder="a")


@pytest.mark.parametrize("from_hub", [True, False])
def test_a_variant_gets_the_names_of_the_files_without_one(hub, tmp_path, from_hub):
    """In each folder that has it, as diffusers' pipelines take it; the others keep theirs."""
    folder = tmp_path / "variants"
    for part, names in {
        "transformer": ("model.safetensors", "model.fp16.safetensors"),
        "vae": ("model.safetensors",),
    }.items():
        (folder / part).mkdir(parents=True)
        for name in names:
            save_file({"weight": torch.full((2,), float("fp16" in name))}, folder / part / name)
    (folder / "encoder").mkdir()
    shard = "model-00001-of-00001.fp16.safetensors"
    save_file({"weight": torch.ones(2)}, folder / "encoder" / shard)
    save_file({"weight": torch.zeros(2)}, folder / "encoder" / "model.safetensors")
    (folder / "encoder" / "model.safetensors.index.fp16.json").write_text(
        json.dumps({"weight_map": {"weight": shard}})
    )
    hub.add("somebody/variants", REVISION, folder)
    place = (
        {"repo": "somebody/variants", "revision": REVISION}
        if from_hub
        else {"repo": None, "revision": None, "folder": str(folder)}
    )
    root = tmp_path / "models"
    entries = download_models(
        models(**place, files=["*"], variant="fp16").repos,
        tmp_path / "revisions.json",
        root,
    )
    write_lock(root, entries)
    found = ModelStore(root).folder("pipeline")
    assert sorted(
        str(file.relative_to(found))
        for file in found.rglob("*.*")
        if file.name != "models.lock.json"
    ) == [
        f"encoder/{shard}",
        "encoder/model.safetensors",
        "encoder/model.safetensors.index.json",
        "transformer/model.safetensors",
        "vae/model.safetensors",
    ]
    if from_hub:  # the client moves what the links of its snapshot lead to
        assert (found / "vae" / "model.safetensors").readlink().parts[-3] == REVISION
    value = lambda path: load_file(found / path)["weight"][0].item()
    assert value("transformer/model.safetensors") == 1 and value("vae/model.safetensors") == 0
