"""Any reward, computed by a server over HTTP. See docs/reward_servers.md."""

import math
from collections.abc import Sequence

import torch

from g2rpo_core.errors import TransientError, UserError
from g2rpo_core.rewards.http_client import HttpClient, Unanswered
from g2rpo_core.rewards.preprocess import Images, check_pairs
from g2rpo_core.rewards.reward_protocol import NPY, PNG, Health, Scored, encode, read_answer, read_health
from g2rpo_core.rewards.server_settings import RewardServerSettings


class RemoteReward:
    """score(images, prompts) -> [N] float32, NaN where a score is missing; `score_with_reasons` also says why.

    The constructor asks the server which reward it serves: UserError if it serves another one, TransientError if it cannot be
    reached now.
    """

    def __init__(self, name: str, settings: RewardServerSettings):
        self.settings, self.where = settings, f"rewards.{name}.server"
        self.client = HttpClient(settings, self.where, " (a score server, see docs/reward_servers.md)")
        self.health = self._health()
        self._check(settings.reward or name)
        self.size = min(settings.max_images_per_request, self.health.max_images or settings.max_images_per_request)

    def _health(self) -> Health:
        try:
            return read_health(self.client.request("/health"))
        except Unanswered as error:
            kind = TransientError if error.passing else UserError
            raise kind(f"{self.where}: {self.client.url} did not say which reward it serves: {error}") from None
        except ValueError as error:
            raise UserError(f"{self.where}: {self.client.url}/health is not a score server: {error}") from None

    def _check(self, reward: str) -> None:
        health, settings = self.health, self.settings
        if health.reward != reward:
            raise UserError(f"{self.where}: {self.client.url} serves {health.reward!r} ({health.label}), not {reward!r}")
        if settings.version not in (None, health.version):
            raise UserError(f"{self.where}.version: {self.client.url} serves version {health.version}, not {settings.version}")
        if PNG not in health.images:
            raise UserError(f"{self.where}: {self.client.url} reads {', '.join(health.images) or 'no images'}, not {PNG}")
        if settings.images == "float32" and NPY not in health.images:
            raise UserError(f"{self.where}.images: {self.client.url} reads {', '.join(health.images)} only: set images: png")

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        return self.score_with_reasons(images, prompts)[0]

    def score_with_reasons(self, images: Images, prompts: Sequence[str]) -> tuple[torch.Tensor, list[str | None]]:
        """Scores [N], and the reason for each that is NaN."""
        check_pairs(images, prompts)
        parts = [slice(start, start + self.size) for start in range(0, len(images), self.size)]
        scored = self.client.together(self._ask, [images[part] for part in parts], [list(prompts[part]) for part in parts])
        pairs = [pair for part in scored for pair in part]
        return torch.tensor([score for score, _ in pairs], dtype=torch.float32), [why for _, why in pairs]

    def _ask(self, images: Images, prompts: list[str]) -> list[Scored]:
        body = {"prompts": prompts, "images": encode(images, self.settings.images)}
        try:
            return read_answer(self.client.request("/score", body), len(prompts))
        except Unanswered as error:
            return [(math.nan, f"no answer: {error}")] * len(prompts)
        except ValueError as error:
            return [(math.nan, f"not scores: {error}")] * len(prompts)
