"""A reward of the user's own: a class with `score(images, prompts) -> tensor [N]`, found by its import path, or a server's."""

import importlib
from collections.abc import Sequence

import torch
from pydantic import Field

from g2rpo_core.errors import UserError
from g2rpo_core.rewards.spec import RewardSettings


class CustomRewardSettings(RewardSettings):
    """A class by import path, and what it is made with; or a server, which may have the class instead.

    version: to be raised when its code changes, so that DVC runs again what uses it; label: its name in reports.
    """

    class_: str | None = Field(None, alias="class", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="package.module:Class")
    settings: dict[str, object] = {}
    version: int = 1
    label: str | None = None


class CustomReward:
    """The user's object behind the interface of all rewards; a score that is NaN counts as one that could not be had."""

    def __init__(self, name: str, settings: CustomRewardSettings):
        self.where = f"rewards.{name}.class: {settings.class_}"
        module, _, attribute = (settings.class_ or "").partition(":")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{self.where}: no module {error.name!r}; modules are looked for in this folder and the environment"
            ) from None
        except AttributeError:
            raise UserError(f"{self.where}: the module {module} has no {attribute!r}") from None
        try:
            self.reward = make(**settings.settings)
        except TypeError as error:
            raise UserError(f"{self.where}: cannot be made with rewards.{name}.settings: {error}") from None
        if not callable(getattr(self.reward, "score", None)):
            raise UserError(f"{self.where}: has no method score(images, prompts)")

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """[N] float32; UserError if the user's score is anything but one number an image."""
        scores = self.reward.score(images, prompts)
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(images),) or scores.is_complex():
            got = f"a tensor {list(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
            raise UserError(f"{self.where}: score(images, prompts) must return a tensor [{len(images)}], it returned {got}")
        return scores.float()
