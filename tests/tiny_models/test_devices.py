"""Small models are built on their device: here one without data, which cannot mix with the CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.build import build_models
from g2rpo_core.tiny_models.language import TinyFlux2, TinyQwenImage
from g2rpo_core.tiny_models.pipeline import TinyFlux, TinyStableDiffusion3
from g2rpo_core.tiny_models.settings import (
    BuiltModels,
    FitSettings,
    VaeSize,
)

CPU, OTHER = torch.device("cpu"), torch.device("meta")
TASK = TASKS["shapes"]
FIT = FitSettings(steps=1, batch=1, learning_rate=1e-3)


MODE = FakeTensorMode(allow_non_fake_inputs=True)


def without_data(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the device without data, which cannot be mixed with one of another."""
    fake = tensor if isinstance(tensor, FakeTensor) else MODE.from_tensor(tensor.detach())
    with MODE:
        return fake.detach().to(device)


def moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a module as `Module.to` does, but without data."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(
                    without_data(parameter, device), requires_grad=False
                )
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = without_data(buffer, device)
    return module


@torch.no_grad()
@pytest.mark.parametrize(
    "twin", [TinyFlux, TinyStableDiffusion3, TinyFlux2, TinyQwenImage]
)  # Z-Image reads its mask, which needs data
def test_a_base_model_is_trained_on_its_device(twin, monkeypatch):
    captions = [scene.caption for scene in TASK.sample(4, 0, testing=False)[0]]
    vae, base = twin.vae.make(TASK.size, VaeSize()), twin(TASK, captions)
    if twin not in (TinyFlux2, TinyQwenImage):
        vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    monkeypatch.setattr(torch.nn.Module, "to", moved)
    for name, value in vars(base).items():
        if name != "parts":
            setattr(base, name, tree_map_only(torch.Tensor, MODE.from_tensor, value))
    vae.to(OTHER)
    moved(base.parts, CPU)
    with MODE:
        base.to(OTHER)
        images = torch.zeros(2, 3, TASK.size, TASK.size, device=OTHER)
        decoded = base.vae.decode(vae, base.vae.encode(vae, images).mean)
        latents = base.pack(base.vae.normalize(vae, base.vae.encode(vae, images).mean))
        sigma, prompt = (
            torch.full((2,), 0.5, device=OTHER),
            torch.ones(2, device=OTHER, dtype=torch.int64),
        )
        velocity = base.velocity(latents, sigma, prompt, None)
    assert decoded.device == velocity.device == OTHER and velocity.shape == latents.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_models_for_a_gpu_are_not_built_without_one(tmp_path):
    """Nor on the CPU instead, which would take days."""
    settings = BuiltModels(source="shapes", seed=0, images=8, vae=FIT, flux=FIT, device="gpu")
    with pytest.raises(UserError, match="models.device: gpu: torch finds no GPU here"):
        build_models(tmp_path / "models", settings, tmp_path / "parts")
    assert list(tmp_path.iterdir()) == []
