import pytest
import torch

from g2rpo_core.tiny_models.fit import MOMENTUM, Muon, fit, orthogonal
from g2rpo_core.tiny_models.settings import FitSettings

HOW = FitSettings(steps=40, batch=4, learning_rate=1e-2, muon_rate=0.1)


@pytest.mark.parametrize(
    "shape",
    [(8, 8), (24, 8)],
)
def test_orthogonal_keeps_the_singular_vectors_and_brings_the_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert values.max() > 2 * values.min()
    diagonal = left.T @ orthogonal(matrix) @ right.T
    assert torch.allclose(diagonal, torch.diag(diagonal.diagonal()), atol=1e-4)
    assert 0.6 < diagonal.diagonal().min() and diagonal.diagonal().max() < 1.25


def test_muons_step_is_its_rate_along_the_orthogonal_momentum_for_any_gradient():
    first, second = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.zeros(12, 3))
    optimizer = Muon([weight], 0.01)
    momentum, expected = torch.zeros(12, 3), torch.zeros(12, 3)
    for gradient in (first, second):
        weight.grad = 1000 * gradient
        optimizer.step()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        expected -= 0.01 * 2 * orthogonal((1 - MOMENTUM) * gradient + MOMENTUM * momentum)
    assert torch.allclose(weight, expected, atol=1e-5)


def test_a_fit_learns_and_is_the_same_every_time():
    def fitted():
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 4, generator=generator)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        before = (model(inputs) - inputs.flip(1)).square().mean().item()
        loss = fit(
            [model],
            lambda rows: (model(inputs[rows]) - inputs[rows].flip(1)).square().mean(),
            HOW,
            generator,
            64,
            "x",
        )
        return before, loss, model[0].weight

    (before, loss, weight), (_, again, same) = fitted(), fitted()
    assert loss < before / 5 and loss == again and torch.equal(weight, same)
