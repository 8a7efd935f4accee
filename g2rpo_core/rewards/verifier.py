"""The exact verifier of tiny worlds as a reward: it has no weights, so it cannot be hacked as a learned one can."""

import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.spec import Reward, RewardSettings, RewardSpec
from g2rpo_core.worlds.table import verify


def _build(models: ModelStore, device: torch.device, settings: RewardSettings) -> Reward:
    return verify


SPEC = RewardSpec("verifier", "Verifier (exact)", _build, settings=RewardSettings, worlds_only=True)
