"""The sigmas with which a published pipeline samples, from its scheduler's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from g2rpo_core.sampling.schedule import even_sigmas

UNSUPPORTED = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "shift_terminal", "invert_sigmas")


@dataclass(frozen=True)
class Schedule:
    """Sigmas shifted towards noise; last: the last one before 0, before it is shifted; None: one step's width, as FLUX has it.

    Diffusion pipelines that leave the sigmas to the scheduler (Stable Diffusion 3) space T of them evenly down to its smallest, and
    come from there to 0 in a last, tiny step.
    """

    shift: float
    last: float | None = None

    def sigmas(self, steps: int) -> list[float]:
        """T + 1 sigmas, falling from 1 to 0."""
        if self.last is None:
            return even_sigmas(steps, self.shift)
        even = [1 - (1 - self.last) * step / max(steps - 1, 1) for step in range(steps)]
        return [self.shift * u / (1 + (self.shift - 1) * u) for u in even] + [0.0]

    @classmethod
    def published(cls, config: Mapping[str, Any], image_tokens: int) -> "Schedule":
        """By a FlowMatchEulerDiscreteScheduler's configuration: its own shift or, if that depends on the resolution, exp(mu).

        That is 3.158 for FLUX.1-dev at 1024². ValueError for a scheduler whose sigmas are not `sigma_at` of any shift.
        """
        if strange := [name for name in UNSUPPORTED if config.get(name)]:
            raise ValueError(f"{strange[0]} is not supported; use a scheduler without it")
        if not config["use_dynamic_shifting"]:
            return cls(config["shift"])
        if config["time_shift_type"] != "exponential":
            raise ValueError(f"time_shift_type {config['time_shift_type']} is not supported, only exponential")
        lengths = (config["base_image_seq_len"], config["max_image_seq_len"])
        return cls(exp(calculate_shift(image_tokens, *lengths, config["base_shift"], config["max_shift"])))
