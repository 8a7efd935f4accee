"""Look up rewards by name: the built-in ones, one line each, and the user's own.

The user's own is a class, given by its import path, whose method `score(images, prompts)` returns a
tensor [N]; or a server.
"""

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError

from g2rpo_core.foundation.errors import UserError, require
from g2rpo_core.foundation.files import reading
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.foundation.settings import problems_of
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards import (
    geneval,
    hpsv3,
    image_reward,
    ocr,
    similarity,
    unified_reward,
)
from g2rpo_core.rewards.preprocess import Images, eight_bit
from g2rpo_core.rewards.remote import RemoteReward, check_key
from g2rpo_core.rewards.spec import Reward, RewardSettings, RewardSpec, Section
from g2rpo_core.tasks.table import problem_of_prompt, verify


class CustomRewardSettings(RewardSettings):
    """A reward of the user's own: a class, or a server, which may have the class instead."""

    class_: str | None = Field(
        None,
        alias="class",
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="Class of the reward, as `package.module:Class`.",
    )
    settings: dict[str, object] = Field({}, description="Keyword arguments of the class.")
    version: int = Field(
        1, description="Raise it when the code changes, so that DVC reruns what uses it."
    )
    label: str | None = Field(None, description="Name in reports.")


def import_class(where: str, path: str) -> Callable[..., Any]:
    """Import the class at `package.module:Class`; UserError if that fails."""
    module, _, attribute = path.partition(":")
    # A program such as `g2rpo` searches only the environment
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{where}: {path}: no module {error.name!r}; modules are searched for in this folder "
            "and the environment"
        ) from None
    except Exception as error:  # the user's own module may raise anything
        if isinstance(error, AttributeError) and error.name == attribute:
            raise UserError(f"{where}: {path}: the module {module} has no {attribute!r}") from None
        raise UserError(f"{where}: {path}: cannot be imported: {describe_error(error)}") from error


def code_of(reward: Reward) -> str | None:
    """Return the hash of the file with a user's own class; None for any other reward."""
    if not isinstance(reward, CustomReward):
        return None
    file = getattr(sys.modules[reward.module], "__file__", None)
    return sha256(Path(file)) if file else None


def class_of(name: str, settings: CustomRewardSettings) -> Callable[..., Any]:
    """Import the class of a user's own reward; UserError if it does not take its settings."""
    make = import_class(f"rewards.{name}.class", settings.class_ or "")
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # of no function, or of one in C
        return make
    try:
        signature.bind(**settings.settings)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise UserError(
            f"rewards.{name}.settings: {settings.class_} {error}; it takes {takes}"
        ) from None
    return make


def describe_error(error: Exception) -> str:
    """Describe an error in the user's own code in one line that ends in the code's file:line."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({at.filename}:{at.lineno})"
    )


class CustomReward:
    """The user's object with the interface of all rewards; a NaN score counts as missing."""

    def __init__(self, name: str, settings: CustomRewardSettings, device: torch.device):
        self.where, self.device = f"rewards.{name}.class: {settings.class_}", device
        self.module = (settings.class_ or "").partition(":")[0]
        make = class_of(name, settings)
        try:
            self.reward = make(**settings.settings)
        except UserError:  # it already says what to do, or that it may pass
            raise
        except Exception as error:  # the user's own code may raise anything
            raise UserError(
                f"{self.where}: cannot be made with rewards.{name}.settings: "
                f"{describe_error(error)}"
            ) from error
        if not callable(getattr(self.reward, "score", None)):
            raise UserError(f"{self.where}: has no method score(images, prompts)")

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        """Return scores [N] float32; UserError unless the user's code gives one number per image.

        It gets tensors; PIL images of several sizes come one at a time.
        """
        if not isinstance(images, torch.Tensor):
            if len({image.size for image in images}) > 1:
                return torch.cat(
                    [self([image], [prompt]) for image, prompt in zip(images, prompts)]
                )
            images = torch.stack(eight_bit(images)).to(self.device) / 255
        before = None if images.is_inference() else images._version
        try:
            scores = self.reward.score(images, prompts)
        except UserError:  # it already says what to do, or that it may pass
            raise
        except Exception as error:  # the user's own code may raise anything
            raise UserError(
                f"{self.where}: score(images, prompts): {describe_error(error)}"
            ) from error
        if before is not None and images._version != before:
            raise UserError(
                f"{self.where}: score(images, prompts) changes its images, "
                "which others score and save: copy them first"
            )
        if (
            not isinstance(scores, torch.Tensor)
            or scores.shape != (len(images),)
            or scores.is_complex()
        ):
            got = (
                f"a tensor {list(scores.shape)}"
                if isinstance(scores, torch.Tensor)
                else f"a {type(scores).__name__}"
            )
            raise UserError(
                f"{self.where}: score(images, prompts) must return a tensor [{len(images)}], "
                f"it returned {got}"
            )
        return scores.float()


def verifier(images: Images, prompts: Sequence[str]) -> torch.Tensor:
    """Score images of tiny tasks exactly, tensors or files."""
    files = not isinstance(images, torch.Tensor)
    return verify(torch.stack(eight_bit(images)) / 255 if files else images, prompts)


SPECS: tuple[RewardSpec, ...] = (
    similarity.HPS,
    similarity.CLIP_SCORE,
    similarity.PICKSCORE,
    image_reward.SPEC,
    unified_reward.SPEC,
    hpsv3.SPEC,
    ocr.SPEC,
    geneval.SPEC,
    # scores images of tiny tasks exactly: it has no weights, so it cannot be hacked as a learned
    # reward can
    RewardSpec(
        "verifier",
        "Verifier (exact)",
        lambda models, device, settings: verifier,
        settings=RewardSettings,
        tasks_only=True,
        problem_of_prompt=problem_of_prompt,
    ),
)
REWARDS: dict[str, RewardSpec] = {spec.name: spec for spec in SPECS}
ALIASES = {alias: spec.name for spec in SPECS for alias in spec.aliases}  # that commands take


def settings_of(section: Section, name: str) -> RewardSettings:
    """Return a reward's typed settings, defaults filled in; ValueError if one does not fit."""
    schema = REWARDS[name].settings if name in REWARDS else CustomRewardSettings
    if schema is CustomRewardSettings and not {"class", "server"} & section.get(name, {}).keys():
        raise ValueError(
            f"rewards.{name}: one of your own needs `class: package.module:Class`, or `server:`; "
            f"built in are {', '.join(REWARDS)}"
        )
    try:
        return schema.model_validate_json(json.dumps(section.get(name, {})))
    except ValidationError as error:
        raise ValueError(
            "; ".join(f"rewards.{name}.{problem}" for problem in problems_of(error, schema))
        ) from None


def models_of(section: Section, name: str) -> tuple[str, ...]:
    """Return which of the profile's models a reward reads."""
    return REWARDS[name].models if name in REWARDS and not settings_of(section, name).remote else ()


def labels(section: Section) -> dict[str, str]:
    """Return the names in reports of all rewards, built-in or in the section `rewards`."""
    custom = {
        name: str(entry.get("label") or name)
        for name, entry in section.items()
        if name not in REWARDS
    }
    return {name: spec.label for name, spec in REWARDS.items()} | custom


def max_missing(names: Sequence[str], section: Section) -> dict[str, float]:
    """Return for each reward the largest share of scores that may be missing before a run stops."""
    return {name: settings_of(section, name).max_missing for name in names}


def load(
    names: Iterable[str],
    models: Path,
    device: torch.device | str = "cpu",
    section: Section | None = None,
) -> dict[str, Reward]:
    """Load the named rewards, in order, from the folder of the stage `models`.

    section: the profile's section `rewards`.
    """
    store = ModelStore(models)
    return {name: build(name, store, torch.device(device), section or {}) for name in names}


def check(name: str, section: Section) -> None:
    """Check a reward before models load; UserError if a class, key or package is missing."""
    settings = settings_of(section, name)
    if isinstance(settings, CustomRewardSettings) and settings.class_ and not settings.remote:
        class_of(name, settings)
    if name in REWARDS and not settings.remote:
        require(f"rewards.{name}", name, *REWARDS[name].requires)
    if server := getattr(settings, "server", None):
        check_key(server, f"rewards.{name}.server")


def build(name: str, models: ModelStore, device: torch.device, section: Section) -> Reward:
    """Build one reward and read its models, if any; UserError if a model is incomplete."""
    settings = settings_of(section, name)
    if settings.score_server is not None:
        return RemoteReward(name, settings.score_server)
    if isinstance(settings, CustomRewardSettings):
        return CustomReward(name, settings, device)
    if not settings.remote:
        require(f"rewards.{name}", name, *REWARDS[name].requires)
        for model in REWARDS[name].models:
            models.folder(model)  # complete, or a UserError
    with reading(models.root / name):
        return REWARDS[name].build(models, device, settings)
