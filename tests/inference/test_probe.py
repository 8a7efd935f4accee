import pytest
import torch

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.inference.probe import probe
from g2rpo_core.rewards import registry
from g2rpo_core.training.experience import RolloutSampler, score_rollout

WEIGHTS = {"hps": 1.0, "clip_score": 2.0}


@pytest.fixture
def probed(policy, models, embeddings, tiny):
    """What two prompts say with six steps, and how it was asked."""
    sampling = tiny.sampling.model_copy(update={"steps": 6})
    rewards = registry.load(list(WEIGHTS), models)
    found = probe(
        policy, rewards, WEIGHTS, embeddings, range(2), sampling, (1, 2, 3), group=4, seed=3
    )
    return found, rewards, sampling


def test_tails_that_take_the_same_steps_agree_wholly(probed):
    """After the last SDE step there is one step left, however coarse the tail."""
    last = probed[0][-1]
    # An image's bits depend on its place in the batch
    assert (
        last.gap == pytest.approx({1: 0, 2: 0, 3: 0}, abs=1e-6)
        and last.evaluations[1] == last.evaluations[3]
    )
    assert last.correlation == pytest.approx({1: 1, 2: 1, 3: 1}, abs=1e-4)
    first = probed[0][0]
    assert (
        first.correlation[1] == pytest.approx(1, abs=1e-4)
        and first.correlation[3] < 1 - 1e-3
        and first.gap[3] != 0
    )


def test_the_spread_is_that_of_a_rollout_with_noise_at_that_step_alone(probed, policy, embeddings):
    found, rewards, sampling = probed
    assert [step.step for step in found] == [0, 1, 2, 3, 4] and found[0].sigma == 1
    method = METHODS["g2rpo"].changed(tree={"sde_steps": (0,), "granularities": (1,)})
    spreads = []
    for index in range(2):
        sampled = RolloutSampler(policy, method, sampling, 4, seed=3)(
            embeddings.conditioning([index]), 0, index
        )
        hps, clip = score_rollout(policy, rewards, sampled, [embeddings.prompts[index].text], 4, 0)
        spreads.append((hps + 2 * clip).flatten().std())
    assert found[0].spread == pytest.approx(torch.stack(spreads).mean().item(), rel=1e-4)
    assert found[0].evaluations == {1: 1 + 4 * 5, 2: 1 + 4 * 3, 3: 1 + 4 * 2}
