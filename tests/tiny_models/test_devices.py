"""Small models are built on the device that the profile asks for."""

import pytest
import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.tiny_models.build import build_models
from g2rpo_core.tiny_models.settings import (
    BuiltModels,
    FitSettings,
)

FIT = FitSettings(steps=1, batch=1, learning_rate=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_models_for_a_gpu_are_not_built_without_one(tmp_path):
    """Nor on the CPU instead, which would take days."""
    settings = BuiltModels(source="shapes", seed=0, images=8, vae=FIT, flux=FIT, device="gpu")
    with pytest.raises(UserError, match="models.device: gpu: torch finds no GPU here"):
        build_models(tmp_path / "models", settings, tmp_path / "parts")
    assert list(tmp_path.iterdir()) == []
