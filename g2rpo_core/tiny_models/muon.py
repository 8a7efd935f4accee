"""The optimizer Muon for weights of linear layers, in float32.

`torch.optim.Muon` iterates in bfloat16, which takes fifteen times as long on a processor without AVX-512.
"""

import math
from collections.abc import Iterable

import torch

QUINTIC = (3.4445, -4.775, 2.0315)  # of Jordan et al. (2024), https://kellerjordan.github.io/posts/muon; so are the next two
ITERATIONS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Steps along Nesterov's momentum with all its singular values made one, as published: times √max(1, rows / columns)."""

    def __init__(self, weights: Iterable[torch.Tensor], learning_rate: float) -> None:
        super().__init__(weights, {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every weight [rows, columns] that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if (gradient := weight.grad) is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
                rows, columns = weight.shape
                scale = math.sqrt(max(1, rows / columns))
                weight.add_(orthogonal(gradient.lerp(momentum, MOMENTUM)), alpha=-group["lr"] * scale)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` [rows, columns] with its singular values brought near 1 (0.7 to 1.2), by Jordan's form of Newton and Schulz's iteration."""
    a, b, c = QUINTIC
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
