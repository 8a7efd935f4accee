import pytest

from g2rpo_core.training.trainer import Trainer
from tests.fixtures.rollouts import redness

SAMPLING = {"steps": 6, "batch_tokens": 64 * 32}
TRAINING = {
    "iterations": 2,
    "prompts_per_iteration": 2,
    "num_generations": 3,
    "batch_tokens": 64 * 32,
    "rewards": {"redness": 1.0},
}


@pytest.fixture
def settings(tiny):
    """The sections `sampling` and `training` of a run of seconds."""
    return tiny.sampling.model_copy(update=SAMPLING), tiny.training.model_copy(update=TRAINING)


@pytest.fixture
def make_trainer(policy, embeddings, settings):
    """make_trainer(method, ...) -> a Trainer with these settings; changes: in the section `training`."""
    sampling, training = settings

    def make(method, *, policy=policy, prompts=embeddings, reward=redness, seed=0, **changes) -> Trainer:
        changed = training.model_copy(update=changes)
        return Trainer(policy, method, sampling, changed, prompts, {"redness": reward}, seed)

    return make
