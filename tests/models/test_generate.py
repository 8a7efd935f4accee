"""Images of test prompts: by which sigmas, and who samples which steps."""

import json

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from g2rpo_core.architectures.flux import Flux
from g2rpo_core.architectures.table import read_schedule
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.generate import generate_images
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.sampling.schedule import even_sigmas, shifted_sigmas
from g2rpo_core.sampling.seeding import generator

FLUX = Flux()

FLUX_SCHEDULER = {  # scheduler/scheduler_config.json of FLUX.1-dev
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}


def with_scheduler(folder, **changes):
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(
        json.dumps(FLUX_SCHEDULER | changes)
    )
    return folder


@pytest.mark.parametrize(
    "tokens, shift",
    [(4096, 3.158), (256, 1.6487)],
)
def test_sigmas_are_those_of_the_published_scheduler_at_any_size(tmp_path, tokens, shift):
    """As FluxPipeline.__call__ asks its scheduler for them; 4096 tokens are 1024 x 1024 pixels."""
    ours = read_schedule(FLUX, with_scheduler(tmp_path), tokens).shift
    assert shift is None or ours == pytest.approx(shift, abs=1e-3)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(FLUX_SCHEDULER)
    retrieve_timesteps(
        scheduler,
        sigmas=[1 - step / 50 for step in range(50)],
        mu=calculate_shift(tokens, 256, 4096, 0.5, 1.15),
    )
    torch.testing.assert_close(shifted_sigmas(50, ours), scheduler.sigmas, rtol=1e-6, atol=1e-6)


def test_a_scheduler_whose_sigmas_are_of_another_kind_is_refused_in_words(tmp_path):
    with pytest.raises(UserError, match="scheduler: use_karras_sigmas .*is not supported"):
        read_schedule(FLUX, with_scheduler(tmp_path, use_karras_sigmas=True), 4096)


def test_images_under_the_resolutions_shift_are_those_of_plain_diffusers(
    policy, models, embeddings, tmp_path
):
    """FLUX.1-dev's scheduler, tiny weights."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(FLUX_SCHEDULER)
    pipeline = FluxPipeline.from_pretrained(
        models / "pipeline", transformer=policy.transformer, scheduler=scheduler
    )
    pipeline.set_progress_bar_config(disable=True)
    (prompts, ours), *_ = generate_images(
        policy,
        embeddings,
        3,
        read_schedule(FLUX, with_scheduler(tmp_path), policy.image_tokens).sigmas(6),
        9,
        3,
    )
    noise = torch.stack([policy.noise(generator("evaluation", 9, prompt.id)) for prompt in prompts])
    how = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 6,
        "guidance_scale": 3.5,
        "max_sequence_length": 16,
    }
    theirs = pipeline(
        [prompt.text for prompt in prompts], latents=noise, output_type="pt", **how
    ).images
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def trained(policy, models):
    """The randomized policy on the models' own base, whose velocity is nearly zero."""
    policy.use_base(models / "pipeline")
    return policy


def generated(policy, embeddings, trained_share: float) -> torch.Tensor:
    how = {"sigmas": even_sigmas(4, 3.0), "seed": 9, "batch": 4}
    return torch.cat(
        [
            images
            for _, images in generate_images(
                policy, embeddings, 6, **how, trained_share=trained_share
            )
        ]
    )


def test_the_base_takes_the_steps_that_are_not_the_trained_ones(trained, embeddings):
    prompts = embeddings.prompts[:6]
    latents = torch.stack(
        [trained.noise(generator("evaluation", 9, prompt.id)) for prompt in prompts]
    )
    conditioning, sigmas = embeddings.conditioning(range(6)), shifted_sigmas(4, 3.0)
    latents = sample(trained.velocity(conditioning), latents, sigmas[:4], 6)
    expected = trained.decode(
        sample(trained.base_velocity(conditioning), latents, sigmas[3:], 6), 6
    )
    torch.testing.assert_close(generated(trained, embeddings, 0.75), expected, rtol=1e-4, atol=1e-5)
    whole = generated(trained, embeddings, 1.0)
    assert not torch.allclose(whole, expected, atol=1e-3)
    trained._base = None
    assert torch.equal(
        generated(trained, embeddings, 1.0), whole
    )  # no base is needed where it takes no step
