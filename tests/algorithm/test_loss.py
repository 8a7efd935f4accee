import torch

from g2rpo_core.algorithm.loss import clipped_loss, masked_loss, normalized_ratio, ratio
from g2rpo_core.sampling.transitions import Transition


def test_gradient_at_ratio_one_is_the_policy_gradient():
    advantages = torch.tensor([2.0, -1.0, 0.0])
    log_prob = torch.zeros(3, requires_grad=True)
    clipped_loss(ratio(log_prob, torch.zeros(3)), advantages, 1e-4).sum().backward()
    assert torch.equal(log_prob.grad, -advantages)


def test_no_gradient_once_the_ratio_left_the_range_in_the_good_direction():
    log_prob = torch.tensor([0.01, -0.01, 0.01, -0.01], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    clipped_loss(ratio(log_prob, torch.zeros(4)), advantages, 1e-4).sum().backward()
    assert log_prob.grad[[0, 3]].tolist() == [0, 0]
    assert (log_prob.grad[[1, 2]] != 0).all()


def test_the_normalized_ratio_has_mean_one_and_a_spread_without_the_noise_level():
    """GRPO-Guard: if the mean moves by d, the log-ratio is mean(d * noise), without bias or std."""
    torch.manual_seed(0)
    moved, noise = 0.05 * torch.randn(16, 1), torch.randn(5000, 16, 1)
    for std in (0.1, 0.9):
        old = Transition(torch.zeros(1, 16, 1), torch.full((1, 1, 1), std))
        new = Transition(moved[None], old.std)
        following = old.sample(noise)
        arguments = new.log_prob(following), old.log_prob(following)
        log_ratio = normalized_ratio(*arguments, new.kl(old), torch.tensor(std)).log()
        torch.testing.assert_close(log_ratio, (moved * noise).mean((1, 2)), rtol=1e-3, atol=1e-5)
        assert ratio(*arguments).log().mean() < -0.5 * new.kl(old)


def test_the_clipped_objective_in_closed_form():
    """min(r A, clip(r, 1 - eps, 1 + eps) A) inside, at and outside both bounds."""
    eps = 0.1
    expected = {  # ratio: objective for A = 2, and for A = -2
        0.5: (1.0, -1.8),
        0.9: (1.8, -1.8),
        0.95: (1.9, -1.9),
        1.0: (2.0, -2.0),
        1.05: (2.1, -2.1),
        1.1: (2.2, -2.2),
        1.15: (2.2, -2.3),
        1.2: (2.2, -2.4),
        3.0: (2.2, -6.0),
    }
    ratios = torch.tensor(list(expected), dtype=torch.float64)
    for column, advantage in enumerate((2.0, -2.0)):
        objective = -clipped_loss(ratios, torch.full_like(ratios, advantage), eps)
        torch.testing.assert_close(
            objective, torch.tensor([row[column] for row in expected.values()], dtype=torch.float64)
        )


def test_what_moved_too_far_is_masked_where_it_would_move_on_and_nowhere_else():
    """Flow-DPPO, Eq. 18: every sign of the advantage, both sides of ratio and threshold."""
    r = torch.tensor([1.1, 1.1, 0.9, 0.9, 1.0, 1.1, 1.1, 0.9, 0.9], requires_grad=True)
    a = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    divergence = torch.tensor([2e-5] * 5 + [1e-6] * 4)
    loss, masked = masked_loss(r, a, divergence, 1e-5)
    assert masked.tolist() == [True, False, False, True, False] + [False] * 4
    torch.testing.assert_close(loss, torch.where(masked, 0.0, -(r * a)))
    (gradient,) = torch.autograd.grad(loss.sum(), r)
    assert torch.equal(gradient, torch.where(masked, 0.0, -a))
    assert (
        masked_loss(r, a, divergence, 2e-5)[1].tolist() == masked.tolist()
    )  # at the threshold it is masked
    assert not masked_loss(r, a, divergence, 2.1e-5)[1].any()
