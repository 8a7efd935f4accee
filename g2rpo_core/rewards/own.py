"""A reward of the user's own: a class with `score(images, prompts) -> tensor [N]`, found by its import path."""

import importlib
from collections.abc import Sequence

import torch

from ..errors import UserError
from .settings import OwnReward


class Own:
    """The user's object behind the interface of all rewards; a score that is NaN counts as one that could not be had."""

    def __init__(self, name: str, settings: OwnReward):
        self.where = f"rewards.{name}.class: {settings.class_}"
        module, _, attribute = settings.class_.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{self.where}: no module {error.name!r}; modules are looked for in this folder and the environment"
            ) from None
        except AttributeError:
            raise UserError(f"{self.where}: the module {module} has no {attribute!r}") from None
        try:
            self.reward = kind(**settings.settings)
        except TypeError as error:
            raise UserError(f"{self.where}: cannot be made with rewards.{name}.settings: {error}") from None
        if not callable(getattr(self.reward, "score", None)):
            raise UserError(f"{self.where}: has no method score(images, prompts)")

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """[N] float32; UserError if the user's score is anything but one number a picture."""
        scores = self.reward.score(images, prompts)
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(images),) or scores.is_complex():
            got = f"a tensor {list(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
            raise UserError(f"{self.where}: score(images, prompts) must return a tensor [{len(images)}], it returned {got}")
        return scores.float()
