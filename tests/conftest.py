"""Real models of seconds: built once a session as profile `tiny` builds them, hardly trained."""

import json
import os
import shutil

from g2rpo_core.numerics.pins import PINS, processor_problem

os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # tests call make, and make may have called them
    os.environ.pop(name, None)
# as the profiles `tiny*` ask; tests that need it fail where the processor cannot
if not processor_problem():
    os.environ.update(PINS)

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from g2rpo_core.config import load_profile
from g2rpo_core.hub.model_store import QUALITY, write_lock
from g2rpo_core.numerics.portable import use
from g2rpo_core.tiny_models.settings import BuiltModels

if not processor_problem():
    use("portable")

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"
# The files that take longest start first, those that need no models before others, so that no
# worker ends alone with one of them.
LONGEST = (
    "pipeline/test_end_to_end",
    "pipeline/test_rehearsal",
    "docs/test_first_commands",
    "studies/test_bases",
    "reliability/test_killed_anywhere",
    "benchmarks/test_benchmarks",
    "reliability/test_there_and_back",
    "flows/test_served",
    "package/test_extras",
    "distributed/test_launch",
    "estimate/test_plan",
    "reliability/test_machine",
    "architectures/test_language",
    "models/test_parallelize",
    "training/test_trainer",
    "pipeline/test_twin_stages",
    "docs/test_documents",
    "cli/test_commands",
    "tools/test_environment",
    "reporting/test_recorded",
    "pipeline/test_flux_profiles",
    "pipeline/test_small_values",
    "distributed/test_checkpoint",
    "reliability/test_full_disk",
    "tiny_models/test_build",
)
# a run of seconds
SAMPLING = {"steps": 6, "batch_tokens": 64 * 32}
TRAINING = {
    "iterations": 2,
    "prompts_per_iteration": 2,
    "num_generations": 3,
    "batch_tokens": 64 * 32,
    "rewards": {"redness": 1.0},
}


def pytest_collection_modifyitems(items):
    places = {ROOT / "tests" / f"{name}.py": place for place, name in enumerate(LONGEST)}
    assert all(file.exists() for file in places), "LONGEST names a file that is gone"
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id) -> Callable[[str, Callable[[Path], None]], Path]:
    """once(name, make) -> a folder that `make` filled, one for all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    home = base if worker_id == "master" else base.parent

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder = home / f"once-{name}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                aside = home / f"{folder.name}.tmp"
                aside.mkdir()
                make(aside)
                aside.rename(folder)
        return folder

    return folder_of


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub on loopback, which the hub's client of this process asks."""
    from huggingface_hub import constants

    from tests.fixtures.small_hub import client_settings, small_hub

    with small_hub() as hub:
        # What is kept of a broken answer comes in whole chunks
        chunks = {"DOWNLOAD_CHUNK_SIZE": 10_000}
        for name, value in (client_settings(hub, tmp_path / "home") | chunks).items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "home" / "xet"))
        yield hub


def hardly(base: str) -> BuiltModels:
    """Settings of models of seconds with this base."""
    from g2rpo_core.tiny_models.build import BUILDERS

    fit = {"steps": 3, "batch": 8, "learning_rate": 1e-3}
    fits = {name: fit for name in ("vae", base, *BUILDERS)}
    return BuiltModels(source="shapes", seed=0, images=64, **fits)


@pytest.fixture(scope="session")
def models(once) -> Path:
    def build(folder: Path) -> None:
        from g2rpo_core.tiny_models.build import build_models

        settings = hardly("flux")
        entries, quality = build_models(folder, settings, folder.with_name("parts"))
        (folder / QUALITY).write_text(json.dumps(quality))
        write_lock(folder, entries)

    return once("models", build)


@pytest.fixture(scope="session")
def twin_pipeline(once) -> Callable[[str], Path]:
    """twin_pipeline(base) -> a folder with `pipeline`: the small twin of `sd3`, `flux2`, ..."""

    def build(folder: Path, base: str) -> None:
        from g2rpo_core.tiny_models.build import build_pipeline

        build_pipeline(folder, hardly(base))

    return lambda base: once(f"{base}_pipeline", partial(build, base=base))


@pytest.fixture(scope="session")
def twin_models(models, twin_pipeline, once) -> Callable[[str], Path]:
    """twin_models(base) -> as `models`, with that twin for the pipeline."""

    def build(folder: Path, base: str) -> None:
        from g2rpo_core.foundation.manifest import describe_files
        from g2rpo_core.hub.model_store import LOCK

        shutil.copytree(
            models, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("pipeline")
        )
        shutil.copytree(twin_pipeline(base), folder, dirs_exist_ok=True)
        entries = json.loads((models / LOCK).read_text())
        write_lock(
            folder,
            entries
            | {"pipeline": {"folder": "pipeline", "files": describe_files(folder / "pipeline")}},
        )

    return lambda base: once(f"{base}_models", partial(build, base=base))


@pytest.fixture(scope="session")
def sd3_models(twin_models) -> Path:
    return twin_models("sd3")


def embed(folder: Path, models: Path, count: int, max_length: int) -> None:
    """Encode `count` training captions of task `shapes` with the pipeline in `models`."""
    from g2rpo_core.architectures.table import text_encoders
    from g2rpo_core.data.embeddings import encode, encode_negative, write, write_negative
    from g2rpo_core.data.prompts import captions

    pipeline = text_encoders(models / "pipeline")
    encoded = partial(encode, pipeline, max_length=max_length, batch=10)
    write(
        folder / "train",
        captions("shapes", count, 0, testing=False),
        encoded,
        "float32",
        shard_rows=10,
    )
    if negative := encode_negative(pipeline, max_length):
        write_negative(folder / "train", negative, "float32")


@pytest.fixture(scope="session")
def sd3_embeddings_folder(sd3_models, once) -> Path:
    """A folder with 12 training captions of task `shapes`, encoded for Stable Diffusion 3."""
    return (
        once("sd3_embeddings", lambda folder: embed(folder, sd3_models, 12, max_length=12))
        / "train"
    )


@pytest.fixture
def policy(models):
    """The tiny policy, hardly trained, with random output and modulation weights."""
    from g2rpo_core.models.policy import Policy
    from tests.fixtures.weights import randomize

    policy = Policy.load_to_train(models / "pipeline", height=32, width=32, guidance=3.5)
    randomize(policy.transformer)
    return policy


@pytest.fixture(scope="session")
def embeddings_folder(models, once) -> Path:
    """A folder with 24 training captions of task `shapes`."""
    return once("embeddings", lambda folder: embed(folder, models, 24, max_length=16)) / "train"


@pytest.fixture(scope="session")
def embeddings(embeddings_folder):
    """The store of that folder."""
    from g2rpo_core.data.embeddings import EmbeddingStore

    return EmbeddingStore(embeddings_folder)


@pytest.fixture(scope="session")
def tiny():
    """The default profile."""
    return load_profile(ROOT / "profiles" / "tiny.yaml")


@pytest.fixture
def settings(tiny):
    """The sections `sampling` and `training` of a run of seconds."""
    return tiny.sampling.model_copy(update=SAMPLING), tiny.training.model_copy(update=TRAINING)


@pytest.fixture
def make_trainer(policy, embeddings, settings):
    """make_trainer(method, ...) -> a Trainer; changes: of the section `training`."""
    from g2rpo_core.training.settings import RunSettings
    from g2rpo_core.training.trainer import Trainer
    from tests.fixtures.rollouts import redness

    sampling, training = settings

    def make(method, *, policy=policy, prompts=embeddings, reward=redness, seed=0, **changes):
        changed = training.model_copy(update=changes)
        return Trainer(
            RunSettings(method, sampling, changed), policy, prompts, {"redness": reward}, seed
        )

    return make
