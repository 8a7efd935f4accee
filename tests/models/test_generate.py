"""Images of test prompts: who samples which steps."""

import pytest
import torch

from g2rpo_core.common.seeding import generator
from g2rpo_core.models.flux import Policy
from g2rpo_core.models.generate import generate_images
from g2rpo_core.rollout.rollout import sample
from g2rpo_core.sampling.schedule import shifted_sigmas


@pytest.fixture
def trained(policy, models):
    """The randomized policy with the models' own pipeline as its base; hardly trained, that one's velocity is nearly zero."""
    policy.use_base(models / "pipeline")
    return policy


def generated(policy, embeddings, trained_share: float) -> torch.Tensor:
    how = {"steps": 4, "shift": 3.0, "seed": 9, "batch": 4}
    return torch.cat([images for _, images in generate_images(policy, embeddings, 6, **how, trained_share=trained_share)])


def test_the_base_takes_the_steps_that_are_not_the_trained_ones(trained, embeddings):
    prompts = embeddings.prompts[:6]
    latents = torch.stack([trained.noise(generator("evaluation", 9, prompt.id)) for prompt in prompts])
    conditioning, sigmas = embeddings.conditioning(range(6)), shifted_sigmas(4, 3.0)
    latents = sample(trained.velocity(conditioning), latents, sigmas[:4], 6)
    expected = trained.decode(sample(trained.base_velocity(conditioning), latents, sigmas[3:], 6), 6)
    torch.testing.assert_close(generated(trained, embeddings, 0.75), expected, rtol=1e-4, atol=1e-5)
    whole = generated(trained, embeddings, 1.0)
    assert not torch.allclose(whole, expected, atol=1e-3)
    trained._base = None
    assert torch.equal(generated(trained, embeddings, 1.0), whole)  # no base is needed where it takes no step


def test_a_share_of_zero_is_the_base(trained, models, embeddings):
    base = Policy.load(models / "pipeline", height=32, width=32, guidance=3.5)
    assert torch.equal(generated(trained, embeddings, 0.0), generated(base, embeddings, 1.0))
