"""Stable Diffusion 3, where it differs from the base models of test_language.py."""

import json
import shutil

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    calculate_shift,
    retrieve_timesteps,
)

from g2rpo_core.architectures.sd3 import StableDiffusion3
from g2rpo_core.architectures.table import read_architecture, text_encoders
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from tests.fixtures.errors import refused

SD3 = StableDiffusion3()
HOW = {"height": 32, "width": 32, "guidance": 4.5}


@pytest.mark.parametrize("dynamic", [False, True])
def test_noise_levels_are_those_of_the_published_scheduler(dynamic):
    """StableDiffusion3Pipeline.__call__ leaves the smallest sigma to its scheduler."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    retrieve_timesteps(
        scheduler, 10, **({"mu": calculate_shift(1024, 256, 4096, 0.5, 1.15)} if dynamic else {})
    )
    ours = SD3.schedule(scheduler.config, 1024).sigmas(10)
    torch.testing.assert_close(torch.tensor(ours), scheduler.sigmas, rtol=1e-5, atol=1e-6)


def test_a_velocity_is_guided_by_that_without_a_prompt(sd3_policy, sd3_embeddings):
    """Sigma reaches the model times 1000, in float32."""
    conditioning = sd3_embeddings.conditioning(range(4))
    latents, sigma, prompt = (
        sd3_policy.noise(torch.Generator().manual_seed(1), 3),
        torch.tensor([1.0, 0.7, 0.3]),
        [2, 0, 3],
    )
    plain = lambda encoded, rows: sd3_policy.transformer(
        latents, encoded["context"][rows], encoded["pooled"][rows], 1000 * sigma, return_dict=False
    )[0]
    without, with_prompt = (
        plain(conditioning.negative, [0, 0, 0]),
        plain(conditioning.tensors, prompt),
    )
    ours = sd3_policy.velocity(conditioning)(latents, sigma, torch.tensor(prompt))
    torch.testing.assert_close(ours, without + 4.5 * (with_prompt - without), rtol=1e-4, atol=1e-5)
    assert (with_prompt - without).abs().max() > 1e-4


def test_a_lora_is_on_flow_grpos_layers(sd3_models):
    """The joint attention of every block; the last block has no output for the text."""
    policy = Policy.load_to_train(sd3_models / "pipeline", LoraSettings(rank=3, alpha=6.0), **HOW)
    names = policy.trained_parameters()
    layers = {name.split(".lora_")[0].split(".", 2)[2] for name in names}
    assert layers == set(SD3.lora_targets) and len(names) == 2 * (4 * 8 - 1)


def test_what_is_missing_is_said_in_words(
    sd3_models, sd3_policy, sd3_embeddings, embeddings, policy, tmp_path
):
    shutil.copytree(sd3_models / "pipeline", tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "model_index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"text_encoder_3": [None, None]}))
    with refused("has no text_encoder_3: Stable Diffusion 3 encodes .* all of text_encoder, "):
        text_encoders(tmp_path / "pipeline")
    file.write_text(json.dumps(index | {"_class_name": "SanaPipeline"}))
    with refused("SanaPipeline is no base model that is known here, only .*, StableDiffusion3"):
        read_architecture(tmp_path / "pipeline")
    with refused("lack the empty prompt, .* Stable Diffusion 3 needs: .*dvc repro"):
        sd3_policy.velocity(embeddings.conditioning([0]))
    narrow = {"context": torch.zeros(1, 28, 32), "pooled": torch.zeros(1, 64)}
    with refused(r"lack a context of width 64 \(theirs has 32\)"):
        sd3_policy.velocity(Conditioning(narrow, narrow))
