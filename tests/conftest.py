"""Real models at a size of seconds: built once a session by the code that builds profile `tiny`, hardly trained."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from functools import partial
from pathlib import Path

import pytest
import torch

from g2rpo_core.common.model_store import write_lock
from g2rpo_core.config import load_profile
from g2rpo_core.tiny_models.settings import FitSettings, ShapesModels

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    from g2rpo_core.tiny_models.build import build_models

    how = FitSettings(steps=3, batch=8, learning_rate=1e-3)
    fits = {name: how for name, field in ShapesModels.model_fields.items() if field.annotation is FitSettings}
    folder = tmp_path_factory.mktemp("models")
    entries, _ = build_models(folder, ShapesModels(source="shapes", seed=0, images=64, **fits))
    write_lock(folder, entries)
    return folder


@pytest.fixture
def policy(models):
    """The tiny policy with random output and modulation weights: DiT's start at zero would make every velocity zero."""
    from g2rpo_core.models.flux import Policy

    policy = Policy.load(models / "pipeline", height=32, width=32, guidance=3.5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.transformer.named_parameters():
            if "norm" in name and "linear" in name or name.startswith("proj_out"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.fixture(scope="session")
def embeddings_folder(models, tmp_path_factory) -> Path:
    """A folder with 24 training captions of the shapes task."""
    from diffusers import FluxPipeline

    from g2rpo_core.data.embeddings import encode, write
    from g2rpo_core.data.prompts import shape_prompts

    folder = tmp_path_factory.mktemp("embeddings") / "train"
    pipeline = FluxPipeline.from_pretrained(models / "pipeline", transformer=None, vae=None)
    encoded = partial(encode, pipeline, max_length=16, batch=10)
    write(folder, shape_prompts(24, 0, testing=False), encoded, "float32", shard_rows=10)
    return folder


@pytest.fixture(scope="session")
def embeddings(embeddings_folder):
    """The store of that folder."""
    from g2rpo_core.data.embeddings import EmbeddingStore

    return EmbeddingStore(embeddings_folder)


@pytest.fixture(scope="session")
def tiny():
    """The default profile."""
    return load_profile(ROOT / "profiles" / "tiny.yaml")
