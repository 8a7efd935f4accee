"""The share of the machine's peak: operations of a real iteration against those counted."""

import pytest
import torch

from g2rpo_core.models.cost import Measured
from g2rpo_core.tracking import utilization
from g2rpo_core.training.metrics import START
from tests.fixtures.rollouts import small_method

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "name",
    ["g2rpo", "diffusion_nft"],
)
def test_operations_of_an_iteration_are_those_that_were_made(name, make_trainer, monkeypatch):
    monkeypatch.setattr(utilization, "peak_flops", lambda device, dtype: 1e9)
    trainer = make_trainer(small_method(name), iterations=1)
    policy = trainer.policy
    blank = lambda latents, batch: torch.rand(len(latents), 3, policy.height, policy.width)
    monkeypatch.setattr(policy, "decode", blank)  # only the transformer is counted
    share = utilization.share_of_peak(trainer)
    with Measured() as measured:
        (record,) = trainer.run()
    assert share(START, record | {"seconds": 2.0}) == pytest.approx(
        measured.flops / 2.0 / 1e9, rel=0.03
    )
