"""Pictures and scores of test prompts: who samples which steps, what is asked of a profile, how pictures look."""

import pytest
import torch

from g2rpo_core import looks
from g2rpo_core.config import EvaluationSettings
from g2rpo_core.evaluation import evaluate_batch, pictures
from g2rpo_core.randomness import generator
from g2rpo_core.rollout import sample
from g2rpo_core.schedule import shifted_sigmas

HYBRID = {"steps": 4, "shift": 3.0, "seed": 9, "batch": 4}


@pytest.fixture
def trained(policy, models):
    """The randomized policy with the models' own pipeline as its base; hardly trained, that one's velocity is nearly zero."""
    policy.use_base(models / "pipeline")
    return policy


def drawn(policy, embeddings, share: float, **changes) -> torch.Tensor:
    return torch.cat([images for _, images in pictures(policy, embeddings, 6, trained_share=share, **HYBRID | changes)])


def test_the_base_takes_the_steps_that_are_not_the_trained_ones(trained, embeddings):
    prompts = embeddings.prompts[:6]
    latents = torch.stack([trained.noise(generator("evaluation", 9, prompt.id)) for prompt in prompts])
    conditioning, sigmas = embeddings.conditioning(range(6)), shifted_sigmas(4, 3.0)
    latents = sample(trained.velocity(conditioning), latents, sigmas[:4], 6)
    expected = trained.decode(sample(trained.base_velocity(conditioning), latents, sigmas[3:], 6), 6)
    torch.testing.assert_close(drawn(trained, embeddings, 0.75), expected, rtol=1e-4, atol=1e-5)
    whole = drawn(trained, embeddings, 1.0)
    assert not torch.allclose(whole, expected, atol=1e-3)
    trained._base = None
    assert torch.equal(drawn(trained, embeddings, 1.0), whole)  # no base is needed where it takes no step


def test_a_share_of_zero_is_the_base(trained, models, embeddings):
    from g2rpo_core.policy import Policy

    base = Policy.load(models / "pipeline", height=32, width=32, guidance=3.5)
    assert torch.equal(drawn(trained, embeddings, 0.0), drawn(base, embeddings, 1.0))


def test_rows_of_a_batch_hold_rewards_looks_and_diversity(policy, embeddings):
    settings = EvaluationSettings(
        steps=(2,), height=32, width=32, rewards=("red",), seed=3, batch=4, diversity={"prompts": 6, "noises": 3}
    )
    red = lambda images, prompts: images[:, 0].mean((1, 2))
    found = {}
    for number in range(6):
        _, images, rows = evaluate_batch(policy, embeddings, {"red": red}, settings, 2, 3.0, number, 1.0)
        torch.testing.assert_close(rows[rows.reward == "red"].score.tolist(), red(images, None).tolist())
        assert rows[rows.reward == "sharpness"].score.tolist() == pytest.approx(looks.sharpness(images).tolist())
        found[number] = rows[rows.reward == "diversity"].prompt_id.tolist()
        assert (rows[rows.reward == "diversity"].score > 0).all()
    ids = [prompt.id for prompt in embeddings.prompts]
    assert found == {0: ids[:4], 1: ids[4:6], 2: [], 3: [], 4: [], 5: []}


def test_looks_have_their_closed_forms():
    grey, red = torch.full((1, 3, 8, 8), 0.4), torch.zeros(1, 3, 8, 8)
    red[:, 0] = 0.7
    assert looks.saturation(torch.cat([grey, red])).tolist() == pytest.approx([0.0, 1.0])
    ramp = torch.linspace(0, 1, 8).expand(1, 3, 8, 8)
    board = torch.zeros(8, 8)
    board[::2, ::2] = board[1::2, 1::2] = 1.0
    flat, checkers = looks.sharpness(torch.cat([ramp, board.expand(1, 3, 8, 8)])).tolist()
    # a plane has no Laplacian; a chessboard's is -4 on white and 4 on black, 18 of the 36 inner pixels each
    assert flat == pytest.approx(0.0, abs=1e-6) and checkers == pytest.approx(4 * (36 / 35) ** 0.5)
    same = torch.rand(1, 5, 3, 8, 8).expand(3, 5, 3, 8, 8)
    moved = torch.stack([torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5), torch.ones(2, 3, 8, 8)])
    assert looks.diversity(same).tolist() == pytest.approx([0.0] * 5, abs=1e-3)
    assert looks.diversity(moved).tolist() == pytest.approx([(0.5 + 1.0 + 0.5) / 3] * 2)


@pytest.mark.parametrize("change", [{"steps": ()}, {"steps": (4, 4)}, {"checkpoints": ("last",)}, {"trained_share": 1.1}])
def test_settings_that_cannot_be_are_refused(tiny, change):
    with pytest.raises(ValueError):
        EvaluationSettings.model_validate({**tiny.evaluation.model_dump(), **change})
