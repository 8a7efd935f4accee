"""The method in one file of plain PyTorch has the scores and gradients of the trainer."""

import pytest
import torch
from diffusers import FluxPipeline

from examples.g2rpo_in_one_file import Model, Settings, iterate, load_pickscore
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.rewards import registry
from g2rpo_core.sampling.seeding import generator
from tests.fixtures.rollouts import redness, small_method


def gradient_of(transformer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in transformer.parameters()])


@pytest.mark.parametrize("granularities", [(1, 2, 3), (3,)])
def test_its_gradient_is_that_of_the_trainer(
    make_trainer, models, policy, embeddings, granularities
):
    method = small_method("g2rpo", tree={"granularities": granularities})
    trainer = make_trainer(method, prompts_per_iteration=1, learning_rate=1e-3)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(policy.transformer))
    record = trainer.iterate(0)

    settings = Settings(
        steps=6,
        sde_steps=method.tree.sde_steps,
        granularities=granularities,
        group=3,
        text_tokens=16,
        rewards={"redness": 1.0},
    )
    pipeline = FluxPipeline.from_pretrained(models / "pipeline")
    pipeline.transformer = policy.transformer
    text = embeddings.prompts[prompt_order(0, 1, len(embeddings), 0)[0]].text
    draw = generator(
        "rollout", 0, 0, 0
    )  # what the trainer draws for the first prompt of the first iteration
    initial, noises = policy.noise(draw, 1), [policy.noise(draw, 3) for _ in settings.sde_steps]
    optimizer = torch.optim.SGD(policy.transformer.parameters(), lr=0.0)
    rewards = {"redness": lambda images, prompt: redness(images, None)}
    figures = iterate(
        Model(pipeline, settings), settings, rewards, text, initial, noises, optimizer
    )

    assert figures["redness"] == pytest.approx(record["reward_redness"], rel=1e-4)
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(gradient_of(policy.transformer), gradients[0], rtol=1e-3, atol=1e-6)


def test_its_pickscore_is_the_projects(models):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    theirs = registry.load(["pickscore"], models)["pickscore"](images, ["a red circle"] * 3)
    torch.testing.assert_close(
        load_pickscore(models)(images, "a red circle"), theirs, rtol=1e-3, atol=1e-5
    )
