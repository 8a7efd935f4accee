import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from g2rpo_core.policy import Policy
from g2rpo_core.rollout import sample
from g2rpo_core.schedule import shifted_sigmas


def test_pictures_are_those_of_plain_diffusers(models, policy, embeddings, tmp_path):
    """The saved weights in a plain FluxPipeline draw the same pictures from the same prompts and noise."""
    policy.save(tmp_path / "transformer")
    trained = FluxTransformer2DModel.from_pretrained(tmp_path / "transformer")
    pipeline = FluxPipeline.from_pretrained(models / "pipeline", transformer=trained)
    pipeline.set_progress_bar_config(disable=True)
    initial = policy.noise(torch.Generator().manual_seed(5), 3)
    texts = [prompt.text for prompt in embeddings.prompts[:3]]
    theirs = pipeline(
        texts,
        height=32,
        width=32,
        num_inference_steps=8,
        guidance_scale=3.5,
        max_sequence_length=16,
        latents=initial,
        output_type="pt",
    ).images
    velocity = policy.velocity(embeddings.conditioning(range(3)))
    ours = policy.decode(sample(velocity, initial, shifted_sigmas(8, 3.0), 2), max_batch=2)
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_samples_of_one_call_may_differ_in_level_and_prompt(policy, embeddings):
    velocity = policy.velocity(embeddings.conditioning(range(4)))
    latents = policy.noise(torch.Generator().manual_seed(1), 4)
    sigma, prompt = torch.tensor([1.0, 0.7, 0.3, 0.9]), torch.tensor([2, 0, 3, 3])
    together = velocity(latents, sigma, prompt)
    alone = torch.cat([velocity(latents[n : n + 1], sigma[n : n + 1], prompt[n : n + 1]) for n in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[2], velocity(latents[2:3], sigma[2:3], prompt[:1])[0], atol=1e-4)


def test_noise_is_drawn_as_diffusers_draws_it(policy):
    unpacked = torch.randn((2, 8, 8, 8), generator=torch.Generator().manual_seed(3))
    expected = FluxPipeline._pack_latents(unpacked, 2, 8, 8, 8)
    assert torch.equal(policy.noise(torch.Generator().manual_seed(3), 2), expected)
    assert policy.noise(torch.Generator().manual_seed(3)).shape == (16, 32)


def test_sizes_must_fit_the_patches(policy):
    with pytest.raises(ValueError, match="divisible by 8"):
        Policy(policy.transformer, policy.vae, height=36, width=32, guidance=3.5)
