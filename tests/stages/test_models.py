"""The stages that make or fetch what others read: models, prompts, published weights."""

import importlib
import shutil

import pytest
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from g2rpo_core.hub.model_store import LOCK, ModelStore
from stages.paths import renewed
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import FIT


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    return tmp_path


def start(stage, folder, profile):
    return run_here(
        importlib.import_module(f"stages.{stage}").main, "--profile", profile, folder=folder
    )


def test_a_download_that_fails_leaves_the_models_that_were_there(folder):
    """Also where they are on another disk, behind a symlink."""
    for name in ("models", "disk/flux_hps"):
        (folder / name).mkdir(parents=True)
    (folder / "disk" / "flux_hps" / LOCK).write_text("{}")
    (folder / "models" / "flux_hps").symlink_to(folder / "disk" / "flux_hps")
    done = start("models", folder, "flux_hps")
    assert done.returncode == 1 and done.stderr.startswith(
        "error: models.repos.pipeline: black-forest-labs/FLUX.1-dev is not in the cache"
    )
    assert (folder / "models" / "flux_hps").is_symlink() and (
        folder / "models" / "flux_hps" / LOCK
    ).read_text() == "{}"
    assert [path.name for path in (folder / "disk").iterdir()] == ["flux_hps"]


def test_a_folder_whose_renewal_was_killed_is_put_back(tmp_path):
    """Before the new one had its last file; after that, the new one stays."""
    (tmp_path / ".tiny.old").mkdir()
    (tmp_path / ".tiny.old" / LOCK).write_text("old")
    (tmp_path / "tiny").mkdir()
    with pytest.raises(KeyboardInterrupt), renewed(tmp_path / "tiny", LOCK):
        raise KeyboardInterrupt
    assert (tmp_path / "tiny" / LOCK).read_text() == "old"
    with renewed(tmp_path / "tiny", LOCK) as made:
        (made / LOCK).write_text("new")
    assert (tmp_path / "tiny" / LOCK).read_text() == "new" and not (tmp_path / ".tiny.old").exists()


@pytest.mark.pipeline
def test_profiles_with_equal_settings_share_models_and_embeddings(folder):
    """By hard links, and each with what it alone decides."""
    fits = {"vae": FIT, "flux": FIT, "clip_score": FIT, "hps": FIT} | dict.fromkeys(
        ("pickscore", "image_reward", "unified_reward")
    )
    few = {
        "prompts": {"train_count": 4, "test_count": 4},
        "evaluation": {"rewards": ["hps", "clip_score"]},
    }
    profiles = {
        "first": {"extends": "tiny", "models": {"images": 16, **fits}, **few},
        "second": {"extends": "first", "training": {"iterations": 7}},
        "third": {"extends": "first", "prompts": {"test_count": 3}},
    }
    for name, profile in profiles.items():
        YAML().dump(profile, folder / "profiles" / f"{name}.yaml")
        for stage in ("models", "prompts", "embed"):
            assert (done := start(stage, folder, name)).returncode == 0, done.stderr
    weights = lambda name: (
        folder
        / "models"
        / name
        / "pipeline"
        / "transformer"
        / "diffusion_pytorch_model.safetensors"
    )
    shard = lambda name: next((folder / "embeddings" / name / "train").glob("*.parquet"))
    quality = lambda name: (folder / "models" / name / "quality.json").read_text()
    assert weights("second").samefile(weights("first")) and shard("second").samefile(shard("first"))
    assert weights("third").samefile(weights("first")) and not shard("third").samefile(
        shard("first")
    )
    assert "hps" in quality("first") and quality("first") == quality("second") == quality("third")


@pytest.fixture
def published(folder, models):
    """published(name=settings, ...) runs the stage on these entries."""
    (folder / "models").mkdir()
    (folder / "models" / "mine").symlink_to(models)

    def run(**entries):
        with (folder / "profiles" / "mine.yaml").open("w") as file:
            YAML().dump({"extends": "tiny", "published": entries}, file)
        (folder / "params.yaml").write_text(
            f"profile: mine\nmethods: []\nseeds: [1]\npublished: [{', '.join(entries)}]\n"
        )
        assert start("profile", folder, "mine").returncode == 0
        return start("published", folder, "mine")

    return run


def test_weights_are_chosen_and_checked_when_they_are_fetched(folder, published, models):
    """By names and shapes in the headers, not after the queue of a cluster."""
    theirs = folder / "theirs"
    shutil.copytree(models / "pipeline" / "transformer", theirs)
    weights = theirs / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, theirs / "diffusion_pytorch_model.ema.safetensors")
    done = published(
        plain={"folder": "theirs"},
        ema={"folder": "theirs", "variant": "ema"},
        file={"folder": str(weights)},
    )
    assert done.returncode == 0, done.stderr
    chosen = {
        name: ModelStore(folder / "published" / "mine" / name, "published").weights(name).name
        for name in ("plain", "ema", "file")
    }
    assert chosen == {
        "plain": weights.name,
        "ema": "diffusion_pytorch_model.ema.safetensors",
        "file": weights.name,
    }
    # Of codes, of another model, without one of its weights, and of no form that is read
    tensors = load_file(weights)
    save_file(tensors | {"proj_out.bias": tensors["proj_out.bias"].bool()}, weights)
    said = "proj_out.bias is bool, and weights are floating-point numbers"
    assert said in published(plain={"folder": "theirs"}).stderr
    save_file({name: value for name, value in tensors.items() if name != "proj_out.bias"}, weights)
    assert published(plain={"folder": "theirs"}).stderr.startswith(
        f"error: {weights.relative_to(folder)}: lacks proj_out.bias (1 such"
    )
    save_file({"lora_unet_blocks_0.lokr_w1": tensors["proj_out.bias"]}, weights)
    assert (
        "is a LoKr of LyCORIS, and 1 of its 1 tensors"
        in published(plain={"folder": "theirs"}).stderr
    )
    assert sorted(path.name for path in (folder / "published" / "mine").iterdir()) == [
        "ema",
        "file",
        "index.json",
        "plain",
    ]  # as before
