"""The rewards by name: the built-in ones, one line each, and the user's own, by import path."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from g2rpo_core.common.model_store import AGAIN, ModelStore
from g2rpo_core.files import reading
from g2rpo_core.rewards import clip_score, hps, image_reward, pickscore, unified_reward, verifier
from g2rpo_core.rewards.custom import CustomReward, CustomRewardSettings, found_class
from g2rpo_core.rewards.http_client import check_key
from g2rpo_core.rewards.remote import RemoteReward
from g2rpo_core.rewards.spec import Reward, RewardSettings, RewardSpec, Section
from g2rpo_core.settings import problems_of

SPECS: tuple[RewardSpec, ...] = (
    hps.SPEC,
    clip_score.SPEC,
    pickscore.SPEC,
    image_reward.SPEC,
    unified_reward.SPEC,
    verifier.SPEC,
)
REWARDS: dict[str, RewardSpec] = {spec.name: spec for spec in SPECS}


def settings_of(section: Section, name: str) -> RewardSettings:
    """The typed settings of one reward, with defaults for what the section leaves out; ValueError if a setting does not fit."""
    schema = REWARDS[name].settings if name in REWARDS else CustomRewardSettings
    if schema is CustomRewardSettings and not {"class", "server"} & section.get(name, {}).keys():
        raise ValueError(
            f"rewards.{name}: one of your own needs `class: package.module:Class`, or `server:`; built in are {', '.join(REWARDS)}"
        )
    try:
        return schema.model_validate_json(json.dumps(section.get(name, {})))
    except ValidationError as error:
        raise ValueError("; ".join(f"rewards.{name}.{problem}" for problem in problems_of(error, schema))) from None


def models_of(section: Section, name: str) -> tuple[str, ...]:
    """Which of the profile's models a reward reads."""
    return REWARDS[name].models if name in REWARDS and not settings_of(section, name).remote else ()


def labels(section: Section) -> dict[str, str]:
    """The names in reports of all rewards, built-in or in the section `rewards`."""
    custom = {name: str(entry.get("label") or name) for name, entry in section.items() if name not in REWARDS}
    return {name: spec.label for name, spec in REWARDS.items()} | custom


def max_missing(names: Sequence[str], section: Section) -> dict[str, float]:
    """For each reward, the largest share of scores that may be missing before a run stops."""
    return {name: settings_of(section, name).max_missing for name in names}


def load(
    names: Sequence[str], models: Path, device: torch.device | str = "cpu", section: Section | None = None
) -> dict[str, Reward]:
    """Loads the named rewards, in order, from the folder of the stage `models`; section: the profile's section `rewards`."""
    store = ModelStore(models)
    return {name: _build(name, store, torch.device(device), section or {}) for name in names}


def check(name: str, section: Section) -> None:
    """Checks a reward before any model is loaded; UserError if, for example, its class is not found or a key is not set."""
    settings = settings_of(section, name)
    if isinstance(settings, CustomRewardSettings) and settings.class_ and not settings.remote:
        found_class(f"rewards.{name}.class", settings.class_)
    if server := getattr(settings, "server", None):
        check_key(server, f"rewards.{name}.server")


def _build(name: str, models: ModelStore, device: torch.device, section: Section) -> Reward:
    settings = settings_of(section, name)
    if settings.score_server is not None:
        return RemoteReward(name, settings.score_server)
    if isinstance(settings, CustomRewardSettings):
        return CustomReward(name, settings)
    for model in () if settings.remote else REWARDS[name].models:
        models.folder(model)  # complete, or a UserError
    with reading(models.root / name, AGAIN):
        return REWARDS[name].build(models, device, settings)
