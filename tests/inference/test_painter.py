"""Images of a seed are those of plain diffusers with `torch.Generator().manual_seed(seed)`."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from g2rpo_core.architectures.table import read_architecture
from g2rpo_core.config import Profile, load_profile
from g2rpo_core.data.prompts import given_prompts
from g2rpo_core.inference.painter import Painter
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.preprocess import pil_images
from tests.conftest import ROOT
from tests.fixtures.weights import randomize

PROFILES = {
    "flux": "tiny",
    "sd3": "tiny_sd3",
    "flux2": "tiny_flux2",
    "zimage": "tiny_zimage",
    "qwen_image": "tiny_qwen_image",
}
PROMPT, STEPS = "a large red circle", 5


def by_diffusers(
    models, run, profile: Profile, seed: int, dtype: torch.dtype, output: str
) -> torch.Tensor | list:
    """Draw as a user of diffusers does who has our weights, prompt and seed."""
    base = read_architecture(models / "pipeline")
    transformer = base.transformer.from_pretrained(run / "transformer", dtype=dtype)
    pipeline = DiffusionPipeline.from_pretrained(
        models / "pipeline", transformer=transformer, torch_dtype=dtype
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=PROMPT,
        height=profile.evaluation.height,
        width=profile.evaluation.width,
        num_inference_steps=STEPS,
        max_sequence_length=profile.embed.max_sequence_length,
        generator=torch.Generator().manual_seed(seed),
        output_type=output,
        **base.pipeline_guidance(profile.sampling.guidance),
    ).images


@pytest.fixture(params=PROFILES)
def drawn(request, models, twin_models, tmp_path):
    """(models, profile, a run of random weights) of each base model."""
    base = request.param
    profile = load_profile(ROOT / "profiles" / f"{PROFILES[base]}.yaml")
    folder = models if base == "flux" else twin_models(base)
    policy = Policy.load_to_train(
        folder / "pipeline", height=32, width=32, guidance=profile.sampling.guidance
    )
    randomize(policy.transformer)
    policy.save(tmp_path)
    return folder, profile, tmp_path


def test_a_seed_has_the_picture_of_plain_diffusers(drawn):
    models, profile, run = drawn
    painter = Painter(profile, models)
    (prompt,) = painter.encode(given_prompts([PROMPT]))
    ours = painter.draw(run, prompt, [3, 4], STEPS)
    theirs = torch.cat(
        [by_diffusers(models, run, profile, seed, torch.float32, "pt") for seed in (3, 4)]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    files = by_diffusers(models, run, profile, 4, torch.float32, "pil")
    differs = np.asarray(files[0]).astype(int) - np.asarray(pil_images(ours)[1]).astype(int)
    # A value that lies between two levels to 1e-4 may round to either
    assert np.abs(differs).max() <= 1 and (differs != 0).mean() < 0.01
