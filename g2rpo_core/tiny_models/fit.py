"""Train every tiny model: one loop, with Muon for the matrices of blocks and AdamW for all else."""

import math
from collections.abc import Callable, Iterable

import torch

from g2rpo_core.foundation.progress import Bar
from g2rpo_core.tiny_models.settings import FitSettings

WARM_UP = 0.05  # of the steps
# Jordan et al. (2024), https://kellerjordan.github.io/posts/muon
QUINTIC = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95


def fit(
    modules: list[torch.nn.Module],
    compute_loss: Callable[[torch.Tensor], torch.Tensor],
    settings: FitSettings,
    generator: torch.Generator,
    count: int,
    label: str,
) -> float:
    """Minimize `compute_loss(indices) -> scalar` with warm-up and cosine decay of the rate.

    Return the mean loss of the last 5 % of the steps. indices: [batch] int64, drawn from
    range(count) with `generator`, on its device.
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizers = make_optimizers(modules, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate_share(step, settings.steps))
        for each in optimizers
    ]
    losses = []
    # two processes show progress at once, each on its own line
    line = 0 if label in ("vae", "transformer") else 1
    bar = Bar(range(settings.steps), desc=label, unit="step", position=line)
    for step in bar:
        loss = compute_loss(
            torch.randint(count, (settings.batch,), generator=generator, device=generator.device)
        )
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        losses.append(loss.item())
        if step % 20 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
    last = losses[-max(1, settings.steps // 20) :]
    return sum(last) / len(last)


def make_optimizers(
    modules: list[torch.nn.Module], settings: FitSettings
) -> list[torch.optim.Optimizer]:
    """Return Muon for linear layers in stacks of blocks, and AdamW for all other parameters.

    First and last layers are AdamW's. With Muon, the tiny transformer of profile `tiny` reaches the
    same loss in half of the steps that AdamW alone takes.
    """
    of_blocks = {
        id(layer.weight)
        for module in modules
        for name, layer in module.named_modules()
        if settings.muon_rate
        and isinstance(layer, torch.nn.Linear)
        and any(part.isdigit() for part in name.split("."))
    }
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    weights = [p for p in trained if id(p) in of_blocks]
    others = [p for p in trained if id(p) not in of_blocks]
    adamw = torch.optim.AdamW(
        others, settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    return [adamw, Muon(weights, settings.muon_rate)] if weights and settings.muon_rate else [adamw]


def rate_share(step: int, steps: int) -> float:
    """Return the learning rate at a step as a share of its peak.

    It rises linearly over the first 5 % of the steps, then falls as a half cosine.
    """
    warm = max(1, round(WARM_UP * steps))
    return (
        (step + 1) / warm
        if step < warm
        else (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2
    )


class Muon(torch.optim.Optimizer):
    """Muon in float32: orthogonalized Nesterov momentum, times √max(1, rows / columns).

    `torch.optim.Muon` iterates in bfloat16, which takes fifteen times as long on a processor
    without AVX-512.
    """

    def __init__(self, weights: Iterable[torch.Tensor], learning_rate: float) -> None:
        super().__init__(weights, {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight [rows, columns] that has a gradient."""
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
                weight.add_(
                    orthogonal(gradient.lerp(momentum, MOMENTUM)), alpha=-group["lr"] * scale
                )


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of `matrix` [rows, columns] near 1 (0.7 to 1.2).

    By Jordan's form of the Newton-Schulz iteration.
    """
    a, b, c = QUINTIC
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
