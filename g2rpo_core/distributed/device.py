"""Checks before anything loads that this machine has a device for the models."""

import os

import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.model_store import LOCK, ModelStore
from g2rpo_core.numerics.cuda import why_none

NEEDS_GPU = 2**30  # bytes of a pipeline from which a run on the CPU takes weeks
ON_CPU = "G2RPO_ON_CPU"  # the environment variable that allows it


def check_device(models: ModelStore) -> None:
    """Check that models of a published size have a GPU; UserError naming why torch finds none.

    Models that are missing are reported later.
    """
    if not (models.root / LOCK).exists():
        return
    size = sum(about["size"] for about in models.entry("pipeline")["files"].values())
    if size >= NEEDS_GPU and os.environ.get(ON_CPU) != "1" and not torch.cuda.is_available():
        raise UserError(
            f"{models.root}: the pipeline has {size / 2**30:.0f} GiB, and torch finds no GPU here: "
            f"{why_none()}; else go to a machine "
            f"with one, or set {ON_CPU}=1 to compute on the CPU for weeks"
        )
