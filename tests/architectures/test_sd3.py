"""Stable Diffusion 3 beside diffusers' own pipeline: encodings, noise levels, velocities, images, adapters, and what a velocity costs."""

import json
import shutil

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    calculate_shift,
    retrieve_timesteps,
)

from g2rpo_core.architectures.sd3 import StableDiffusion3
from g2rpo_core.architectures.table import read_architecture, read_schedule, text_encoders
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.training.loop import train
from g2rpo_core.training.settings import CheckpointSettings, RunSettings
from g2rpo_core.training.trainer import Trainer
from tests.fixtures.rollouts import redness, small_method
from tests.fixtures.weights import randomize

SD3 = StableDiffusion3()
HOW = {"height": 32, "width": 32, "guidance": 4.5}


def images_by_diffusers(pipeline, texts, initial, guidance=4.5, steps=6) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    settings = {
        "height": 32,
        "width": 32,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": 12,
    }
    return pipeline(texts, latents=initial, output_type="pt", **settings).images


@pytest.mark.parametrize("guidance", [4.5, 1.0])
def test_images_are_those_of_plain_diffusers(
    sd3_models, sd3_policy, sd3_embeddings, tmp_path, guidance
):
    """The saved weights in a plain pipeline draw the same images, with classifier-free guidance and without."""
    sd3_policy.guidance = guidance
    sd3_policy.save(tmp_path)
    trained = SD3Transformer2DModel.from_pretrained(tmp_path / "transformer")
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        sd3_models / "pipeline", transformer=trained
    )
    initial = sd3_policy.noise(torch.Generator().manual_seed(5), 3)
    texts = [prompt.text for prompt in sd3_embeddings.prompts[:3]]
    sigmas = read_schedule(SD3, sd3_models / "pipeline", sd3_policy.image_tokens).sigmas(6)
    ours = sd3_policy.decode(
        sample(sd3_policy.velocity(sd3_embeddings.conditioning(range(3))), initial, sigmas, 2), 2
    )
    assert ours.std() > 0.01
    torch.testing.assert_close(
        ours, images_by_diffusers(pipeline, texts, initial, guidance), rtol=1e-3, atol=1e-3
    )


def test_noise_is_drawn_as_diffusers_draws_it(sd3_models, sd3_policy):
    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3_models / "pipeline")
    theirs = pipeline.prepare_latents(
        2, 8, 32, 32, torch.float32, "cpu", torch.Generator().manual_seed(3)
    )
    assert torch.equal(sd3_policy.noise(torch.Generator().manual_seed(3), 2), theirs)
    assert (
        sd3_policy.noise(torch.Generator().manual_seed(3)).shape == (8, 8, 8)
        and sd3_policy.image_tokens == 16
    )


@pytest.mark.parametrize("steps", [1, 10, 40])
@pytest.mark.parametrize("dynamic", [False, True])
def test_noise_levels_are_those_of_the_published_scheduler(steps, dynamic):
    """As StableDiffusion3Pipeline.__call__ asks its scheduler for them, which leaves the smallest to it."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    retrieve_timesteps(
        scheduler, steps, **({"mu": calculate_shift(1024, 256, 4096, 0.5, 1.15)} if dynamic else {})
    )
    ours = SD3.schedule(scheduler.config, 1024).sigmas(steps)
    torch.testing.assert_close(torch.tensor(ours), scheduler.sigmas, rtol=1e-5, atol=1e-6)


def test_a_velocity_is_guided_by_that_without_a_prompt(sd3_policy, sd3_embeddings):
    """Rows of one call may differ in sigma and prompt; sigma reaches the model times 1000, in float32."""
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


def test_encodings_are_those_of_the_pipeline(sd3_models, sd3_embeddings):
    pipeline = text_encoders(sd3_models / "pipeline")
    stored = sd3_embeddings.conditioning([11, 0])
    texts = [sd3_embeddings.prompts[number].text for number in (11, 0)]
    with torch.no_grad():
        theirs = pipeline.encode_prompt(texts, None, None, max_sequence_length=12)
    ours = (
        stored.tensors["context"],
        stored.negative["context"],
        stored.tensors["pooled"],
        stored.negative["pooled"],
    )
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.expand_as(other), other, rtol=1e-5, atol=1e-5)
    config = SD3Transformer2DModel.load_config(sd3_models / "pipeline" / "transformer")
    shapes = SD3.encoding_shapes(config, 12, pipeline.tokenizer.model_max_length)
    assert shapes == {name: tuple(tensor.shape[1:]) for name, tensor in stored.tensors.items()}
    assert SD3.text_tokens(stored.tensors) == 28


@pytest.mark.parametrize("guidance, each", [(4.5, 2), (1.0, 1)])
def test_every_forward_evaluation_of_guidance_is_counted(
    sd3_models, sd3_embeddings, tiny, guidance, each
):
    """The rows that the transformer really gets in rollouts are those of the record; no call is larger than asked for."""
    policy = Policy.load_to_train(sd3_models / "pipeline", **HOW | {"guidance": guidance})
    randomize(policy.transformer)
    changes = {
        "iterations": 1,
        "num_generations": 4,
        "rewards": {"redness": 1.0},
        "batch_tokens": 44 * 6,
    }
    training = tiny.training.model_copy(update=changes)
    sampling = tiny.sampling.model_copy(
        update={"steps": 6, "guidance": guidance, "batch_tokens": 44 * 6}
    )
    method, rows, largest = small_method("g2rpo"), [0], [0]

    def count(_, args, kwargs):
        if not torch.is_grad_enabled():
            rows[0] += len(kwargs["hidden_states"])
        largest[0] = max(largest[0], len(kwargs["hidden_states"]))

    policy.transformer.register_forward_pre_hook(count, with_kwargs=True)
    trainer = Trainer(
        RunSettings(method, sampling, training),
        policy,
        sd3_embeddings,
        {"redness": redness},
        seed=1,
    )
    (record,) = trainer.run()
    expected = (
        each * method.tree.build(6, 0, 1).num_forward_evals(4) * training.prompts_per_iteration
    )
    assert policy.forward_evals == each and rows[0] == record["num_forward_evals"] == expected
    assert largest[0] <= 6 and record["old_policy_ratio_error"] < 1e-6 and record["grad_norm"] > 0


def test_a_run_that_was_stopped_goes_on_bit_for_bit(sd3_models, sd3_embeddings, tiny, tmp_path):
    changes = {
        "iterations": 2,
        "num_generations": 2,
        "rewards": {"redness": 1.0},
        "learning_rate": 1e-3,
    }
    training = tiny.training.model_copy(
        update=changes | {"checkpoints": CheckpointSettings(every=1)}
    )
    sampling = tiny.sampling.model_copy(update={"steps": 6, "guidance": 4.5})

    def run(folder, reward) -> dict[str, torch.Tensor]:
        policy = Policy.load_to_train(sd3_models / "pipeline", **HOW)
        randomize(policy.transformer)
        trainer = Trainer(
            RunSettings(small_method("g2rpo"), sampling, training),
            policy,
            sd3_embeddings,
            {"redness": reward},
            seed=1,
        )
        folder.mkdir(exist_ok=True)
        train(trainer, folder, dict, lambda record: None)
        return policy.transformer.state_dict()

    scored = []

    def failing(images, prompts):
        scored.append(len(images))
        if len(scored) > training.prompts_per_iteration:
            raise RuntimeError("stopped in the second iteration")
        return redness(images, prompts)

    with pytest.raises(RuntimeError, match="second iteration"):
        run(tmp_path / "stopped", failing)
    resumed, straight = run(tmp_path / "stopped", redness), run(tmp_path / "straight", redness)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.fixture
def adapted(sd3_models, sd3_policy, tmp_path):
    """The randomized policy as a base on disk, and a policy on it whose LoRA is not zero."""
    shutil.copytree(sd3_models / "pipeline", tmp_path / "pipeline")
    sd3_policy.save(tmp_path / "pipeline")
    adapted = Policy.load_to_train(tmp_path / "pipeline", LoraSettings(rank=3, alpha=6.0), **HOW)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.trained_parameters().values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted


def test_a_lora_is_on_flow_grpos_layers(adapted):
    """The joint attention of every block, not the second one; the last block has no output for the text."""
    layers = {
        name.split(".lora_")[0].partition(".")[2].partition(".")[2]
        for name in adapted.trained_parameters()
    }
    assert layers == set(SD3.lora_targets)
    assert len(adapted.trained_parameters()) == 2 * (4 * 8 - 1)


def test_a_saved_lora_draws_the_same_images_in_plain_diffusers(adapted, sd3_embeddings, tmp_path):
    adapted.save(tmp_path / "run")
    initial, texts = (
        adapted.noise(torch.Generator().manual_seed(5), 2),
        [prompt.text for prompt in sd3_embeddings.prompts[:2]],
    )
    plain = StableDiffusion3Pipeline.from_pretrained(tmp_path / "pipeline")
    unadapted = images_by_diffusers(plain, texts, initial)
    plain.load_lora_weights(tmp_path / "run" / "lora")
    theirs = images_by_diffusers(plain, texts, initial)
    loaded = Policy.load(tmp_path / "pipeline", tmp_path / "run", **HOW)
    sigmas = read_schedule(SD3, tmp_path / "pipeline", 16).sigmas(6)
    ours = loaded.decode(
        sample(loaded.velocity(sd3_embeddings.conditioning([0, 1])), initial, sigmas, 2), 2
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert (theirs - unadapted).abs().max() > 0.01


def test_what_is_missing_is_said_in_words(
    sd3_models, sd3_policy, sd3_embeddings, embeddings, policy, tmp_path
):
    shutil.copytree(sd3_models / "pipeline", tmp_path / "pipeline")
    index = json.loads((tmp_path / "pipeline" / "model_index.json").read_text())
    (tmp_path / "pipeline" / "model_index.json").write_text(
        json.dumps(index | {"text_encoder_3": [None, None]})
    )
    with pytest.raises(
        UserError,
        match=(
            "has no text_encoder_3: Stable Diffusion 3 encodes its prompts with all of "
            "text_encoder, "
        ),
    ):
        text_encoders(tmp_path / "pipeline")
    (tmp_path / "pipeline" / "model_index.json").write_text(
        json.dumps(index | {"_class_name": "SanaPipeline"})
    )
    with pytest.raises(
        UserError,
        match="SanaPipeline is no base model that is known here, only FluxPipeline, StableDiffusion3",
    ):
        read_architecture(tmp_path / "pipeline")
    with pytest.raises(
        UserError,
        match="the encoded prompts lack the empty prompt, .* Stable Diffusion 3 needs: .*dvc repro",
    ):
        sd3_policy.velocity(embeddings.conditioning([0]))
    narrow = {"context": torch.zeros(1, 28, 32), "pooled": torch.zeros(1, 64)}
    with pytest.raises(UserError, match=r"lack a context of width 64 \(theirs has 32\)"):
        sd3_policy.velocity(Conditioning(narrow, narrow))
    with pytest.raises(UserError, match="at most 64 for this Stable Diffusion 3, got 72x32"):
        Policy.load(sd3_models / "pipeline", height=72, width=32, guidance=4.5)
    with pytest.raises(UserError, match="lack their pooled, which FLUX.1 needs"):
        policy.velocity(Conditioning({"context": torch.zeros(1, 28, 64)}))
