"""Real models at a size of seconds: built once a session by the code that builds profile `tiny`, hardly trained."""

import json
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: each, and what it starts, computes in one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from g2rpo_core.common.model_store import write_lock
from g2rpo_core.config import load_profile
from g2rpo_core.tiny_models.settings import BuiltModels, FitSettings

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id) -> Callable[[str, Callable[[Path], None]], Path]:
    """once(name, make) -> a folder that `make` has filled, the same one in all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    home = base if worker_id == "master" else base.parent
    home = Path(os.environ.get("G2RPO_ONCE", home))  # of several sessions (tools/mutants.py)

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


@pytest.fixture(scope="session")
def models(once) -> Path:
    def build(folder: Path) -> None:
        from g2rpo_core.tiny_models.build import BUILDERS, build_models

        how = FitSettings(steps=3, batch=8, learning_rate=1e-3)
        fits = dict.fromkeys(("vae", *BUILDERS), how)
        entries, _ = build_models(folder, BuiltModels(source="shapes", seed=0, images=64, flux=how, **fits))
        write_lock(folder, entries)

    return once("models", build)


@pytest.fixture(scope="session")
def sd3_models(models, once) -> Path:
    """As `models`, with a tiny Stable Diffusion 3 for the pipeline."""

    def build(folder: Path) -> None:
        from g2rpo_core.common.model_store import LOCK, describe_files
        from g2rpo_core.tiny_models.build import BUILDERS, build_pipeline

        how = FitSettings(steps=3, batch=8, learning_rate=1e-3)
        fits = dict.fromkeys(("vae", *BUILDERS), how)
        shutil.copytree(models, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("pipeline"))
        build_pipeline(folder, BuiltModels(source="shapes", seed=0, images=64, sd3=how, **fits))
        entries = json.loads((models / LOCK).read_text())
        write_lock(folder, entries | {"pipeline": {"folder": "pipeline", "files": describe_files(folder / "pipeline")}})

    return once("sd3_models", build)


def embed(folder: Path, models: Path, count: int, max_length: int) -> None:
    """Encodes so many training captions of world `shapes` by the pipeline in `models`, in parts of 10."""
    from g2rpo_core.bases.table import text_encoders
    from g2rpo_core.data.embeddings import encode, encode_negative, write, write_negative
    from g2rpo_core.data.prompts import captions

    pipeline = text_encoders(models / "pipeline")
    encoded = partial(encode, pipeline, max_length=max_length, batch=10)
    write(folder / "train", captions("shapes", count, 0, testing=False), encoded, "float32", shard_rows=10)
    if negative := encode_negative(pipeline, max_length):
        write_negative(folder / "train", negative, "float32")


@pytest.fixture
def sd3_policy(sd3_models):
    """The tiny policy of Stable Diffusion 3, with random output and modulation weights."""
    from g2rpo_core.models.policy import Policy
    from tests.fixtures.weights import randomize

    policy = Policy.load_to_train(sd3_models / "pipeline", height=32, width=32, guidance=4.5)
    randomize(policy.transformer)
    return policy


@pytest.fixture(scope="session")
def sd3_embeddings_folder(sd3_models, once) -> Path:
    """A folder with 12 training captions of world `shapes`, encoded for Stable Diffusion 3."""
    return once("sd3_embeddings", lambda folder: embed(folder, sd3_models, 12, max_length=12)) / "train"


@pytest.fixture(scope="session")
def sd3_embeddings(sd3_embeddings_folder):
    """The store of that folder."""
    from g2rpo_core.data.embeddings import EmbeddingStore

    return EmbeddingStore(sd3_embeddings_folder)


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
    """A folder with 24 training captions of world `shapes`."""
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
