import torch

from g2rpo_core.objective import clipped_loss, ratio


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


def test_clipping_is_pessimistic():
    r = torch.linspace(0.9, 1.1, 21)
    for advantage in (1.0, -1.0):
        a = torch.full_like(r, advantage)
        assert (clipped_loss(r, a, 0.02) >= -(r * a)).all()
