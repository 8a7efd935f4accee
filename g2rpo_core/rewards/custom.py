"""The user's own reward: a class with `score(images, prompts) -> tensor [N]`, given by its import path, or a server."""

import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field

from g2rpo_core.errors import UserError
from g2rpo_core.rewards.spec import RewardSettings


class CustomRewardSettings(RewardSettings):
    """A class by import path, and its arguments; or a server, which may have the class instead.

    version: raise it when the class's code changes, so that DVC reruns what uses it; label: its name in reports. = Field(description='raise it when the code changes, so that DVC reruns what uses it')
    """

    class_: str | None = Field(None, alias="class", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="package.module:Class")
    settings: dict[str, object] = Field({}, description="what the class is made with")
    version: int = 1
    label: str | None = Field(None, description="its name in reports")


def found_class(where: str, path: str) -> Callable[..., Any]:
    """The class at `package.module:Class`; UserError if the module cannot be imported, or has no such class."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{where}: {path}: no module {error.name!r}; modules are searched for in this folder and the environment"
        ) from None
    except AttributeError as error:
        if getattr(error, "name", None) == attribute:
            raise UserError(f"{where}: {path}: the module {module} has no {attribute!r}") from None
        raise UserError(f"{where}: {path}: cannot be imported: {in_words(error)}") from error
    except Exception as error:  # the user's own module may raise anything
        raise UserError(f"{where}: {path}: cannot be imported: {in_words(error)}") from error


def in_words(error: Exception) -> str:
    """An error in the user's own code as one line, with the line of code that raised it."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({at.filename}:{at.lineno})"


class CustomReward:
    """The user's object behind the interface of all rewards; a NaN score counts as missing."""

    def __init__(self, name: str, settings: CustomRewardSettings):
        self.where = f"rewards.{name}.class: {settings.class_}"
        make = found_class(f"rewards.{name}.class", settings.class_ or "")
        try:
            self.reward = make(**settings.settings)
        except UserError:  # it already says what to do, or that it may pass
            raise
        except Exception as error:  # the user's own code may raise anything
            raise UserError(f"{self.where}: cannot be made with rewards.{name}.settings: {in_words(error)}") from error
        if not callable(getattr(self.reward, "score", None)):
            raise UserError(f"{self.where}: has no method score(images, prompts)")

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """[N] float32; UserError if the user's score is anything but one number per image."""
        try:
            scores = self.reward.score(images, prompts)
        except UserError:  # it already says what to do, or that it may pass
            raise
        except Exception as error:  # the user's own code may raise anything
            raise UserError(f"{self.where}: score(images, prompts): {in_words(error)}") from error
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(images),) or scores.is_complex():
            got = f"a tensor {list(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
            raise UserError(f"{self.where}: score(images, prompts) must return a tensor [{len(images)}], it returned {got}")
        return scores.float()
