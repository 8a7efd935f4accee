"""The loop that trains every tiny model."""

import math
from collections.abc import Callable

import torch
from tqdm import tqdm

from g2rpo_core.tiny_models.muon import Muon
from g2rpo_core.tiny_models.settings import FitSettings

WARM_UP = 0.05  # of the steps


def fit(
    modules: list[torch.nn.Module],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    how: FitSettings,
    generator: torch.Generator,
    count: int,
    label: str,
) -> float:
    """Linear warm-up over 5 % and cosine decay on `loss_of(indices) -> scalar`; the last 5 % steps' mean loss.

    indices: [batch] int64, drawn from range(count) with `generator`. See `optimizers_of` for what takes the steps.
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizers = optimizers_of(modules, how)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: share_of_peak(step, how.steps)) for each in optimizers]
    losses = []
    line = 0 if label in ("vae", "transformer") else 1  # two processes draw, each on a line of its own
    bar = tqdm(range(how.steps), desc=label, mininterval=2, unit="step", position=line)
    for step in bar:
        loss = loss_of(torch.randint(count, (how.batch,), generator=generator))
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        losses.append(loss.item())
        if step % 20 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
    last = losses[-max(1, how.steps // 20) :]
    return sum(last) / len(last)


def optimizers_of(modules: list[torch.nn.Module], how: FitSettings) -> list[torch.optim.Optimizer]:
    """Muon for the weights of linear layers in stacks of blocks, and AdamW for all else, first and last layers as well.

    The tiny transformer of profile `tiny` gets to the same loss in half of the steps that AdamW alone takes.
    """
    of_blocks = {
        id(layer.weight)
        for module in modules
        for name, layer in module.named_modules()
        if how.muon_rate and isinstance(layer, torch.nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    weights = [p for p in trained if id(p) in of_blocks]
    others = [p for p in trained if id(p) not in of_blocks]
    adamw = torch.optim.AdamW(others, how.learning_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    return [adamw, Muon(weights, how.muon_rate)] if weights and how.muon_rate else [adamw]


def share_of_peak(step: int, steps: int) -> float:
    """Share of the peak learning rate in a step of range(steps): it rises over the first 5 %, then falls as a half cosine."""
    warm = max(1, round(WARM_UP * steps))
    return (step + 1) / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2
