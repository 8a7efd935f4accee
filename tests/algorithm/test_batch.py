"""What an optimizer step is given: advantages, parts of the group, and rows of states."""

import itertools

import pytest
import torch

from g2rpo_core.algorithm.advantage import branch_advantages
from g2rpo_core.algorithm.batch import split_updates, transition_batches
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer
from tests.fixtures.rollouts import small_method, with_advantages


def test_advantages_stay_with_their_prompt_and_branch():
    scores = torch.randn(
        2, 3, 4, 2, 5, generator=torch.Generator().manual_seed(0)
    )  # [R, P, B, J, G]
    ours = branch_advantages(scores, [1.0, 0.5], clip=100)
    for prompt, branch in itertools.product(range(3), range(4)):
        group = scores[:, prompt, branch]  # [R, J, G]
        standardized = (group - group.mean(-1, keepdim=True)) / group.std(-1, keepdim=True)
        expected = standardized[0].sum(0) + 0.5 * standardized[1].sum(0)
        torch.testing.assert_close(ours[prompt, branch], expected, rtol=1e-4, atol=1e-4)


def test_updates_on_parts_of_the_group_cover_every_transition_once(policy, embeddings, settings):
    trainer = Trainer(
        RunSettings(small_method("mix_grpo"), *settings), policy, embeddings, {}, seed=0
    )
    sampled = trainer.sampler(embeddings.conditioning([0, 1]), 0).transitions
    advantages = torch.randn(2, 1, 3)
    transitions = [with_advantages(each, advantages) for each in sampled]
    assert split_updates(transitions, "step") == [[each] for each in transitions]
    assert split_updates(transitions, "iteration") == [transitions]
    for updates, sizes in ((2, [2, 1]), (3, [1, 1, 1]), (7, [1, 1, 1]), ("iteration", [3])):
        parts = split_updates(transitions, updates)
        for index, transition in enumerate(sampled):
            of_parts = [part[index] for part in parts]
            assert [part.advantages.shape[-1] for part in of_parts] == sizes
            assert torch.equal(
                torch.cat([part.advantages for part in of_parts], -1), advantages[:, 0]
            )
            assert torch.equal(
                torch.cat([part.sampled.next_latents for part in of_parts], 1),
                transition.next_latents,
            )
            assert torch.equal(
                torch.cat([part.sampled.log_prob for part in of_parts], 1), transition.log_prob
            )


@pytest.mark.parametrize(
    "name, states", [("g2rpo", [(3 * 2, 3)]), ("mix_grpo", [(2, 3), (3 * 2 * 3, 1)])]
)
def test_rows_keep_what_belongs_together(policy, embeddings, settings, name, states):
    """One row per shared state with all its members; else one row per member."""
    trainer = Trainer(RunSettings(small_method(name), *settings), policy, embeddings, {}, seed=0)
    transitions = trainer.sampler(embeddings.conditioning([0, 1]), 0).transitions
    branches = 1 + max(transition.sde_step.branch for transition in transitions)
    advantages = torch.randn(2, branches, 3, generator=torch.Generator().manual_seed(0))
    batches = transition_batches([with_advantages(each, advantages) for each in transitions])
    assert [tuple(batch.old_log_prob.shape) for batch in batches] == states
    expected = {
        transition.log_prob[prompt, member].item(): (
            transition.latents[prompt, member // transition.members_of_state],
            transition.next_latents[prompt, member],
            advantages[prompt, transition.sde_step.branch, member],
            transition.sde_step.step,
            prompt,
        )
        for transition in transitions
        for prompt, member in itertools.product(range(2), range(3))
    }
    for batch in batches:
        for row, column in itertools.product(*map(range, batch.old_log_prob.shape)):
            latents, next_latents, advantage, step, prompt = expected.pop(
                batch.old_log_prob[row, column].item()
            )
            assert torch.equal(batch.latents[row], latents) and torch.equal(
                batch.next_latents[row, column], next_latents
            )
            assert (batch.advantages[row, column], batch.step[row], batch.prompt[row]) == (
                advantage,
                step,
                prompt,
            )
    assert not expected
