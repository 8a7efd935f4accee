"""Weights wherever they lie: runs, exported folders, and what others publish."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.sampling.settings import SamplingSettings
from tests.conftest import ROOT

HOW = {"height": 32, "width": 32, "guidance": 3.5}


def velocity(policy, embeddings):
    arguments = (
        policy.noise(torch.Generator().manual_seed(1), 2),
        torch.tensor([0.9, 0.4]),
        torch.tensor([0, 1]),
    )
    return policy.velocity(embeddings.conditioning([0, 1]))(*arguments)


def test_a_transformer_without_a_configuration_has_the_pipelines(
    policy, models, embeddings, tmp_path
):
    """As yujieouo/G2RPO publishes its weights; and in a folder below, as DanceGRPO's."""
    policy.save(tmp_path / "run")
    (tmp_path / "published" / "checkpoint").mkdir(parents=True)
    shutil.copy(
        tmp_path / "run" / "transformer" / "diffusion_pytorch_model.safetensors",
        tmp_path / "published" / "checkpoint",
    )
    loaded = Policy.load(models / "pipeline", tmp_path / "published", **HOW)
    assert torch.equal(velocity(loaded, embeddings), velocity(policy, embeddings))


def test_a_lora_is_known_by_its_weights(models, embeddings, tmp_path):
    adapted = Policy.load_to_train(models / "pipeline", LoraSettings(rank=3, alpha=6.0), **HOW)
    with torch.no_grad():
        for parameter in adapted.trained_parameters().values():
            parameter.copy_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    adapted.save(tmp_path / "run")
    (tmp_path / "published").mkdir()
    shutil.copy(
        tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors",
        tmp_path / "published" / "by_somebody.safetensors",
    )
    loaded = Policy.load(models / "pipeline", tmp_path / "published", **HOW)
    assert torch.equal(velocity(loaded, embeddings), velocity(adapted, embeddings))


def test_the_file_of_a_lora_is_the_same_in_every_process(models, tmp_path):
    """Python orders a set of texts by a number that it draws at its start."""
    code = (
        "import sys; from pathlib import Path; from g2rpo_core.models.policy import Policy; "
        "from g2rpo_core.models.settings import LoraSettings\n"
        "how = dict(height=32, width=32, guidance=3.5)\n"
        "Policy.load_to_train(Path(sys.argv[1]), LoraSettings(rank=2, alpha=4.0), "
        "**how).save(Path(sys.argv[2]))"
    )
    files = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-c", code, models / "pipeline", tmp_path / seed],
            env=environment,
            check=True,
        )
        files.append((tmp_path / seed / "lora" / "pytorch_lora_weights.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_lora_of_layers_that_are_not_there_is_one_line_about_the_setting(models):
    with pytest.raises(
        UserError, match="training.lora.target_modules: Target modules {'to_querry'} not found"
    ) as error:
        Policy.load_to_train(
            models / "pipeline",
            LoraSettings(rank=2, alpha=4.0, target_modules=("to_querry",)),
            **HOW,
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no safetensors; it must hold a transformer or a LoRA"),
        ({"one/a": "weight", "two/a": "weight"}, "weights in 2 folders"),
        (
            {"pytorch_lora_weights": "x.lora_A.weight", "adapter_model": "x.lora_A.weight"},
            r"holds 2 files of weights \(adapter_model.safetensors; pytorch_lora_weights.safetensors\): name one",
        ),
        (
            {"a": "x.lora_A.weight", "b": "x.lora_A.weight"},
            r"holds 2 files of weights \(a.safetensors; b.safetensors\): name one",
        ),
        (
            {"a": "unet.x.lora_A.weight"},
            r"is a LoRA of a U-Net, and 1 of its 1 tensors have no place in this FLUX.1's transformer \(unet.x.lora_A.weight\)",
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


def backends(transformer) -> set:
    return {
        module.processor._attention_backend
        for module in transformer.modules()
        if hasattr(module, "processor")
    }


def test_rollout_update_and_base_attend_by_the_backend_of_the_settings(
    models, embeddings, monkeypatch
):
    """As one of two processes; sharding, which needs the other one, is left out."""
    monkeypatch.setattr("g2rpo_core.models.policy.parallelize", lambda *_: None)
    how = {
        **HOW,
        "parallel": ParallelSettings(replica=True),
        "processes": ProcessGroup(0, 2),
        "base": True,
    }
    chosen = Policy.load_to_train(models / "pipeline", attention="native", **how)
    plain = Policy.load_to_train(models / "pipeline", **how)
    for policy, backend in ((chosen, "native"), (plain, None)):
        assert [backends(each) for each in (policy.transformer, policy._replica, policy._base)] == [
            {backend}
        ] * 3
    assert torch.equal(velocity(chosen, embeddings), velocity(plain, embeddings))


def test_a_backend_that_this_machine_or_model_lacks_ends_in_one_line(models, sd3_models):
    for folder, backend, message in (
        (models, "flash", "sampling.attention: flash cannot be used here .*flash-attn"),
        (
            sd3_models,
            "native",
            "SD3Transformer2DModel has attention that takes no backend: set it to null",
        ),
    ):
        with pytest.raises(UserError, match=message) as error:
            Policy.load(folder / "pipeline", attention=backend, **HOW)
        assert "\n" not in str(error.value)


def test_a_backend_that_diffusers_does_not_know_is_refused_with_those_it_knows(tiny):
    with pytest.raises(
        ValidationError, match="must be one of flash, .*native, .*xformers, or null"
    ):
        SamplingSettings.model_validate({**tiny.sampling.model_dump(), "attention": "fast"})


def test_weights_kept_in_bfloat16_sample_as_those_in_float32(policy, models, embeddings, tmp_path):
    sizes, sampled = [], []
    for dtype in (torch.float32, torch.bfloat16):
        run = tmp_path / str(dtype)
        policy.save(run, dtype)
        (file,) = (run / "transformer").glob("*.safetensors")
        sizes.append(file.stat().st_size)
        sampled.append(
            velocity(Policy.load(models / "pipeline", run, dtype=torch.bfloat16, **HOW), embeddings)
        )
    assert torch.equal(*sampled) and sizes[1] < 0.51 * sizes[0]
