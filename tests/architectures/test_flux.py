import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.sampling.schedule import shifted_sigmas


def test_images_are_those_of_plain_diffusers(models, policy, embeddings, tmp_path):
    """The saved weights in a plain FluxPipeline draw the same images from the same prompts and noise."""
    policy.save(tmp_path)
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


def test_samples_of_one_call_may_differ_in_sigma_and_prompt(policy, embeddings):
    velocity = policy.velocity(embeddings.conditioning(range(4)))
    latents = policy.noise(torch.Generator().manual_seed(1), 4)
    sigma, prompt = torch.tensor([1.0, 0.7, 0.3, 0.9]), torch.tensor([2, 0, 3, 3])
    together = velocity(latents, sigma, prompt)
    alone = torch.cat(
        [velocity(latents[n : n + 1], sigma[n : n + 1], prompt[n : n + 1]) for n in range(4)]
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        together[2], velocity(latents[2:3], sigma[2:3], prompt[:1])[0], atol=1e-4
    )


def test_noise_is_drawn_as_diffusers_draws_it(policy):
    unpacked = torch.randn((2, 8, 8, 8), generator=torch.Generator().manual_seed(3))
    expected = FluxPipeline._pack_latents(unpacked, 2, 8, 8, 8)
    assert torch.equal(policy.noise(torch.Generator().manual_seed(3), 2), expected)
    assert policy.noise(torch.Generator().manual_seed(3)).shape == (16, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigma_and_guidance_reach_the_time_embedding_as_they_are(models, embeddings, dtype):
    """diffusers alone rounds them to the dtype of the hidden states: 976 for 978.26, and 3504 for 3500, in bfloat16."""
    policy = Policy.load(models / "pipeline", height=32, width=32, guidance=3.5, dtype=dtype)
    seen = []
    policy.transformer.time_text_embed.time_proj.register_forward_hook(
        lambda module, given, _: seen.append(given[0])
    )
    sigmas = torch.tensor([45 / 46, 0.9545454, 0.8333333, 0.7941176])
    latents = policy.noise(torch.Generator().manual_seed(1), 4)
    policy.velocity(embeddings.conditioning([0]))(
        latents, sigmas, torch.zeros(4, dtype=torch.int64)
    )
    times, guidances = seen
    assert torch.equal(times, 1000 * sigmas) and torch.equal(guidances, torch.full((4,), 3500.0))


def test_sizes_must_fit_the_patches(policy):
    with pytest.raises(UserError, match="divisible by 8"):
        Policy(
            policy.architecture, policy.transformer, policy.vae, height=36, width=32, guidance=3.5
        )


def images_by_diffusers(
    pipeline: FluxPipeline, texts: list[str], initial: torch.Tensor
) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    settings = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "max_sequence_length": 16,
    }
    return pipeline(texts, latents=initial, output_type="pt", **settings).images


@pytest.fixture
def adapted(models, policy, tmp_path):
    """The randomized policy as a base on disk, and a policy on it whose LoRA is not zero."""
    policy.save(tmp_path / "base")
    pipeline = FluxPipeline.from_pretrained(
        models / "pipeline",
        transformer=FluxTransformer2DModel.from_pretrained(tmp_path / "base" / "transformer"),
    )
    pipeline.save_pretrained(tmp_path / "pipeline")
    lora = LoraSettings(rank=3, alpha=6.0)
    adapted = Policy.load_to_train(tmp_path / "pipeline", lora, height=32, width=32, guidance=3.5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.trained_parameters().values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted


def test_a_lora_alone_is_trained_and_starts_as_the_base(models, policy, embeddings):
    adapted = Policy.load_to_train(
        models / "pipeline", LoraSettings(rank=2, alpha=2.0), height=32, width=32, guidance=3.5
    )
    names = adapted.trained_parameters()
    assert names and all("lora_" in name for name in names)
    assert (
        sum(parameter.numel() for parameter in names.values())
        < sum(p.numel() for p in policy.transformer.parameters()) / 20
    )
    base = Policy.load(models / "pipeline", height=32, width=32, guidance=3.5)
    latents = policy.noise(torch.Generator().manual_seed(1), 2)
    arguments = latents, torch.tensor([0.9, 0.4]), torch.tensor([0, 1])
    conditioning = embeddings.conditioning([0, 1])
    assert torch.equal(
        adapted.velocity(conditioning)(*arguments), base.velocity(conditioning)(*arguments)
    )


def test_a_saved_lora_draws_the_same_images_in_plain_diffusers_bit_for_bit(
    adapted, embeddings, tmp_path
):
    adapted.save(tmp_path / "run")
    initial, texts = (
        adapted.noise(torch.Generator().manual_seed(5), 2),
        [prompt.text for prompt in embeddings.prompts[:2]],
    )
    in_memory = FluxPipeline.from_pretrained(tmp_path / "pipeline", transformer=adapted.transformer)
    plain = FluxPipeline.from_pretrained(tmp_path / "pipeline")
    before = images_by_diffusers(plain, texts, initial)
    plain.load_lora_weights(tmp_path / "run" / "lora")
    ours, theirs = (
        images_by_diffusers(pipeline, texts, initial) for pipeline in (in_memory, plain)
    )
    assert torch.equal(ours, theirs)
    assert (theirs - before).abs().max() > 0.01
    loaded = Policy.load(tmp_path / "pipeline", tmp_path / "run", height=32, width=32, guidance=3.5)
    again = FluxPipeline.from_pretrained(tmp_path / "pipeline", transformer=loaded.transformer)
    assert torch.equal(images_by_diffusers(again, texts, initial), ours)


def test_the_base_under_a_lora_needs_no_second_model(adapted, policy, embeddings):
    adapted.keep_base()
    assert adapted._base is None
    arguments = (
        policy.noise(torch.Generator().manual_seed(1), 2),
        torch.tensor([0.9, 0.4]),
        torch.tensor([0, 1]),
    )
    conditioning = embeddings.conditioning([0, 1])
    base = adapted.base_velocity(conditioning)(*arguments)
    assert torch.equal(base, policy.velocity(conditioning)(*arguments))
    assert not torch.allclose(adapted.velocity(conditioning)(*arguments), base, atol=1e-3)
