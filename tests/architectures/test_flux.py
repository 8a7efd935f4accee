import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.sampling.schedule import shifted_sigmas
from tests.fixtures.rollouts import check_rows, two_velocities
from tests.fixtures.weights import randomize_lora


def test_images_are_those_of_plain_diffusers(models, policy, embeddings, tmp_path):
    policy.save(tmp_path)
    trained = FluxTransformer2DModel.from_pretrained(tmp_path / "transformer")
    pipeline = FluxPipeline.from_pretrained(models / "pipeline", transformer=trained)
    initial = policy.noise(torch.Generator().manual_seed(5), 3)
    theirs = images_by_diffusers(
        pipeline, [prompt.text for prompt in embeddings.prompts[:3]], initial, steps=8
    )
    velocity = policy.velocity(embeddings.conditioning(range(3)))
    ours = policy.decode(sample(velocity, initial, shifted_sigmas(8, 3.0), 2), max_batch=2)
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_samples_of_one_call_may_differ_in_sigma_and_prompt(policy, embeddings):
    check_rows(policy, embeddings)


def test_sigma_and_guidance_reach_the_time_embedding_as_they_are(models, embeddings):
    """In bfloat16, diffusers alone rounds 978.26 to 976, and 3500 to 3504."""
    policy = Policy.load(
        models / "pipeline", height=32, width=32, guidance=3.5, dtype=torch.bfloat16
    )
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


def images_by_diffusers(
    pipeline: FluxPipeline, texts: list[str], initial: torch.Tensor, steps: int = 4
) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    how = {"guidance_scale": 3.5, "max_sequence_length": 16, "output_type": "pt"}
    how |= {"height": 32, "width": 32, "num_inference_steps": steps}
    return pipeline(texts, latents=initial, **how).images


@pytest.fixture
def adapted(models, policy, tmp_path):
    """The randomized policy as a base on disk, and a policy on it with a new LoRA."""
    policy.save(tmp_path / "base")
    pipeline = FluxPipeline.from_pretrained(
        models / "pipeline",
        transformer=FluxTransformer2DModel.from_pretrained(tmp_path / "base" / "transformer"),
    )
    pipeline.save_pretrained(tmp_path / "pipeline")
    lora = LoraSettings(rank=3, alpha=6.0)
    return Policy.load_to_train(tmp_path / "pipeline", lora, height=32, width=32, guidance=3.5)


def test_a_saved_lora_draws_the_same_images_in_plain_diffusers_bit_for_bit(
    adapted, embeddings, tmp_path
):
    randomize_lora(adapted)
    adapted.save(tmp_path / "run")
    initial = adapted.noise(torch.Generator().manual_seed(5), 2)
    texts = [prompt.text for prompt in embeddings.prompts[:2]]
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


def test_a_lora_starts_as_the_base_which_stays_under_it(adapted, policy, embeddings):
    base = two_velocities(policy, embeddings)
    assert torch.equal(two_velocities(adapted, embeddings), base)
    randomize_lora(adapted)
    adapted.keep_base()
    assert adapted._base is None  # no second model
    assert torch.equal(two_velocities(adapted, embeddings, adapted.base_velocity), base)
    assert not torch.allclose(two_velocities(adapted, embeddings), base, atol=1e-3)
