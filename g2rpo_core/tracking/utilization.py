"""The share of the machine's peak FLOP/s that a run reaches, by the costs of `g2rpo plan`."""

from collections.abc import Callable, Mapping

import torch

from g2rpo_core.models.cost import PEAK_TFLOPS, Call, transformer_cost
from g2rpo_core.training.trainer import Trainer

Share = Callable[[Mapping, Mapping], float]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a GPU's FLOP/s by its data sheet; None for a CPU, unknown GPUs, and not bfloat16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def share_of_peak(trainer: Trainer) -> Share | None:
    """Return a function of two records, the later one last: the share of the peak between them.

    Of all processes' peak; None if it is unknown. Counted are the transformer's operations,
    recomputed ones as well; decoding and scoring take time alone. Where padding is left out, texts
    count with the length of the longest of the first prompts.
    """
    policy, training = trainer.policy, trainer.training
    if (peak := peak_flops(policy.device, policy.dtype)) is None:
        return None
    # One latent: a forward, and a forward and backward with what the objective adds
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in policy.transformer.config.items()
    }
    config = {key: value for key, value in values.items() if not key.startswith("_")}
    some = policy.cut(
        trainer.prompts.conditioning(
            range(min(training.prompts_per_iteration, len(trainer.prompts)))
        )
    )
    tokens = policy.image_tokens, policy.architecture.text_tokens(some.tensors)
    cost = lambda *how: (
        transformer_cost(policy.architecture, config, Call(1, *tokens, policy.dtype, *how)).flops
    )
    forward = cost(False)
    trained = (
        cost(True, training.lora, training.gradient_checkpointing)
        + forward * trainer.method.objective.extra_forwards
    )

    def share(before: Mapping, after: Mapping) -> float:
        gone = {
            key: after[key] - before[key]
            for key in ("num_forward_evals", "num_transitions", "seconds")
        }
        flops = (
            gone["num_forward_evals"] * forward
            + gone["num_transitions"] * policy.forward_evals * trained
        )
        return flops / gone["seconds"] / (peak * trainer.processes.size)

    return share
