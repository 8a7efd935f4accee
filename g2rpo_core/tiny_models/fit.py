"""The loop that trains every tiny model."""

import torch
from tqdm import tqdm

from g2rpo_core.tiny_models.settings import FitSettings


def fit(modules: list[torch.nn.Module], loss_of, how: FitSettings, generator: torch.Generator, count: int, label: str) -> float:
    """AdamW with linear warm-up over 5 % and cosine decay on `loss_of(indices) -> scalar`; the last 5 % steps' mean loss.

    indices: [batch] int64, drawn from range(count) with `generator`.
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, how.learning_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, how.learning_rate, total_steps=how.steps + 1, pct_start=0.05, cycle_momentum=False
    )
    losses = []
    line = 0 if label in ("vae", "flux") else 1  # two processes draw, each on a line of its own
    bar = tqdm(range(how.steps), desc=label, mininterval=2, unit="step", position=line)
    for step in bar:
        loss = loss_of(torch.randint(count, (how.batch,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
    last = losses[-max(1, how.steps // 20) :]
    return sum(last) / len(last)
