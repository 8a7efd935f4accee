"""Images of test prompts: by which sigmas, and who samples which steps."""

import json

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from g2rpo_core.architectures import flux2
from g2rpo_core.architectures.flux import Flux
from g2rpo_core.architectures.table import read_schedule
from g2rpo_core.models.generate import generate_images
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.sampling.schedule import shifted_sigmas
from g2rpo_core.sampling.seeding import generator
from tests.fixtures.errors import refused

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


def with_scheduler(folder, named=None, **changes):
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(
        json.dumps(FLUX_SCHEDULER | changes)
    )
    index = {"scheduler": ["diffusers", named or FLUX_SCHEDULER["_class_name"]]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "tokens, shift",
    [(4096, 3.158), (256, 1.6487)],
)
def test_sigmas_are_those_of_the_published_scheduler_at_any_size(tmp_path, tokens, shift):
    """As FluxPipeline.__call__ asks its scheduler for them; 4096 tokens are 1024 x 1024 pixels."""
    ours = read_schedule(FLUX, with_scheduler(tmp_path), tokens).shift
    assert ours == pytest.approx(shift, abs=1e-3)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(FLUX_SCHEDULER)
    retrieve_timesteps(
        scheduler,
        sigmas=[1 - step / 50 for step in range(50)],
        mu=calculate_shift(tokens, 256, 4096, 0.5, 1.15),
    )
    torch.testing.assert_close(shifted_sigmas(50, ours), scheduler.sigmas, rtol=1e-6, atol=1e-6)


HEUN = "FlowMatchHeunDiscreteScheduler"


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"use_karras_sigmas": True}, "use_karras_sigmas True is not supported"),
        ({"time_shift_type": "linear"}, "time_shift_type linear is not supported"),
        ({"stochastic_sampling": True}, "stochastic_sampling True is not supported"),
        ({"_class_name": HEUN}, f"is sampled by {HEUN}, here only FlowMatchEulerDiscreteScheduler"),
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}, "is sampled by UniPC"),
        ({"named": HEUN}, f"is sampled by {HEUN}, here only"),
    ],
)
def test_a_scheduler_that_samples_otherwise_is_refused_by_name(tmp_path, changes, why):
    """Whichever base model it is of, FLUX.2's own shift too."""
    with refused(f"scheduler_config.json: {why}"):
        read_schedule(flux2.ARCHITECTURE, with_scheduler(tmp_path, **changes), 4096)


def test_the_base_takes_the_steps_that_are_not_the_trained_ones(policy, models, embeddings):
    """The base's own velocity is nearly zero."""
    policy.use_base(models / "pipeline")
    latents = torch.stack(
        [policy.noise(generator("evaluation", 9, prompt.id)) for prompt in embeddings.prompts[:6]]
    )
    conditioning, sigmas = embeddings.conditioning(range(6)), shifted_sigmas(4, 3.0)
    latents = sample(policy.velocity(conditioning), latents, sigmas[:4], 6)
    expected = policy.decode(sample(policy.base_velocity(conditioning), latents, sigmas[3:], 6), 6)
    how = {"sigmas": sigmas.tolist(), "seed": 9, "batch": 4}
    part, whole = (
        torch.cat([made for _, made in generate_images(policy, embeddings, 6, **how, **share)])
        for share in ({"trained_share": 0.75}, {})
    )
    torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, expected, atol=1e-3)
