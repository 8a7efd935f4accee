"""Weights wherever they lie: runs, exported folders, and what others publish."""

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.sampling.settings import SamplingSettings
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import two_velocities

HOW = {"height": 32, "width": 32, "guidance": 3.5}


def test_a_lora_of_layers_that_are_not_there_is_one_line_about_the_setting(models):
    lora = LoraSettings(rank=2, alpha=4.0, target_modules=("to_querry",))
    with refused("no module of FluxTransformer2DModel is called to_querry"):
        Policy.load_to_train(models / "pipeline", lora, **HOW)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no safetensors; it must hold a transformer or a LoRA"),
        (
            {"pytorch_lora_weights": "x.lora_A.weight", "adapter_model": "x.lora_A.weight"},
            r"2 files of weights \(adapter_model.*; pytorch_lora_weights.*\): name one",
        ),
        (
            {"a": "unet.x.lora_A.weight"},
            r"is a LoRA of a U-Net, .* no place in this FLUX.1's .* \(unet.x.lora_A.weight\)",
        ),
        (
            {"a": "double_blocks.0.img_attn.qkv.weight"},
            "its weights belong to another model, or are incomplete",
        ),
    ],
)
def test_weights_that_cannot_be_read_are_named(models, tmp_path, files, message):
    for name, key in files.items():
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file({key: torch.zeros(2, 2)}, path)
    with pytest.raises(UserError, match=message):
        Policy.load(models / "pipeline", tmp_path, **HOW)


def test_a_backend_that_this_machine_or_model_lacks_ends_in_one_line(models, sd3_models, tiny):
    for folder, backend, message in (
        (models, "flash", "sampling.attention: flash cannot be used here .*flash-attn"),
        (
            sd3_models,
            "native",
            "SD3Transformer2DModel has attention that takes no backend: set it to null",
        ),
    ):
        with refused(message):
            Policy.load(folder / "pipeline", attention=backend, **HOW)
    with pytest.raises(ValidationError, match="must be one of flash, .*native, .*xformers, or"):
        SamplingSettings.model_validate({**tiny.sampling.model_dump(), "attention": "fast"})


def test_weights_kept_in_bfloat16_sample_as_those_in_float32(policy, models, embeddings, tmp_path):
    sizes, sampled = [], []
    for dtype in (torch.float32, torch.bfloat16):
        run = tmp_path / str(dtype)
        policy.save(run, dtype)
        (file,) = (run / "transformer").glob("*.safetensors")
        sizes.append(file.stat().st_size)
        sampled.append(
            two_velocities(
                Policy.load(models / "pipeline", run, dtype=torch.bfloat16, **HOW), embeddings
            )
        )
    assert torch.equal(*sampled) and sizes[1] < 0.51 * sizes[0]
