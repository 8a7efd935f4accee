"""Training that goes on from weights or a LoRA: it begins as they are, and is held to them."""

from functools import partial

import pytest
import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from tests.fixtures.rollouts import two_velocities

HOW = {"height": 32, "width": 32, "guidance": 3.5}
LORA = LoraSettings(rank=2, alpha=6.0, target_modules=("to_q", "proj_mlp"))


def moved(policy, seed=0):
    """The policy, after training of a kind."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trained_parameters().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.fixture(scope="module")
def kept(pipeline, tmp_path_factory):
    """A folder with two runs, of whole weights and of a LoRA."""
    home = tmp_path_factory.mktemp("kept")
    moved(Policy.load_to_train(pipeline, **HOW)).save(home / "whole")
    moved(Policy.load_to_train(pipeline, LORA, **HOW), seed=1).save(home / "lora")
    return home


@pytest.mark.parametrize(
    "run, lora, exact", [("whole", None, True), ("lora", LORA, True), ("lora", None, False)]
)
def test_it_begins_as_the_weights_are_and_keeps_them_as_its_base(
    pipeline, embeddings, kept, run, lora, exact
):
    start = kept / run
    close = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-5)
    expected = two_velocities(Policy.load(pipeline, start, **HOW), embeddings)
    plain = two_velocities(Policy.load(pipeline, **HOW), embeddings)
    policy = Policy.load_to_train(pipeline, lora, base=True, start=start, **HOW)
    assert close(two_velocities(policy, embeddings), expected) and not close(expected, plain)
    moved(policy, seed=5)
    after = two_velocities(policy, embeddings)
    assert close(two_velocities(policy, embeddings, policy.base_velocity), expected) and not close(
        after, expected
    )
    assert torch.equal(two_velocities(policy, embeddings), after)  # the base was only looked at


def test_the_base_can_be_looked_at_before_a_backward_pass(pipeline, embeddings, kept):
    """The update calls the policy with gradients, then its base without, then goes backwards."""

    def gradients(look: bool):
        policy = Policy.load_to_train(pipeline, LORA, base=True, start=kept / "lora", **HOW)
        moved(policy, seed=5)
        conditioning = embeddings.conditioning([0, 1])
        x, sigma = (
            torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)),
            torch.tensor([0.9, 0.4]),
        )
        output = policy.velocity(conditioning)(x, sigma, torch.tensor([0, 1]))
        if look:
            two_velocities(policy, embeddings, policy.base_velocity)
        output.square().sum().backward()
        return [parameter.grad for parameter in policy.trained_parameters().values()]

    assert all(torch.equal(one, other) for one, other in zip(gradients(False), gradients(True)))


@pytest.mark.parametrize(
    "run, changes, message",
    [
        (
            "lora",
            {"rank": 4},
            "training.start: its LoRA has rank 2: set training.lora.rank to that",
        ),
        (
            "lora",
            {"target_modules": ("to_q", "to_v", "proj_mlp")},
            r"its LoRA lacks .*to_v \(\d+ such differences\)",
        ),
        (
            "whole",
            {},
            (
                "training.start: are whole weights, and training.lora a LoRA on those of the base "
                "model: set it to null"
            ),
        ),
    ],
)
def test_what_does_not_go_on_as_it_is_is_refused(pipeline, kept, run, changes, message):
    with pytest.raises(UserError, match=message):
        Policy.load_to_train(pipeline, LORA.model_copy(update=changes), start=kept / run, **HOW)
