"""The section `rewards` of a profile: settings of the rewards that are built in, and rewards of the user's own by import path."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ..settings import Settings, first_problem

Positive = Annotated[int, Field(ge=1)]
Section = Mapping[str, Mapping[str, object]]


class RewardSettings(Settings):
    """Of every reward. max_missing: the share of pictures without a score from which an evaluation stops."""

    max_missing: float = Field(0.05, ge=0, lt=1)


class ScorerSettings(RewardSettings):
    """Of a reward with a model. micro_batch: pictures in one call of it; dtype: of its weights and computation.

    Scores are float32 in any case. In bfloat16 they are not those of the published package to 1e-5.
    """

    micro_batch: Positive = 256
    dtype: Literal["float32", "bfloat16"] = "float32"


class OwnReward(RewardSettings):
    """A reward of the user's own: a class by import path, and what it is made with.

    version: to be raised when its code changes, so that DVC runs again what uses it; label: its name in reports.
    """

    class_: str = Field(alias="class", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="package.module:Class")
    settings: dict[str, object] = {}
    version: int = 1
    label: str | None = None


class ServerSettings(Settings):
    """A server that speaks OpenAI's chat completions.

    url: up to and with its version, such as http://localhost:8000/v1; timeout: seconds for one try; tries: of each picture;
    backoff: seconds before the second try, doubled before each further one; key_variable: the environment variable that
    holds the server's key.
    """

    url: str = Field(pattern=r"^https?://\S+$")
    model: str
    timeout: float = Field(120, gt=0)
    tries: Positive = 5
    backoff: float = Field(1.0, ge=0)
    concurrency: Positive = 16
    key_variable: str | None = None


class UnifiedRewardSettings(ScorerSettings):
    """template: which family of questions (see `templates`), it has to fit the model; server: where to ask, None: in this process.

    dtype: auto is that of the model's files.
    """

    micro_batch: Positive = 16
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    template: Literal["final_score.v1", "word_axes.v1", "axes.v1"] = "final_score.v1"
    max_new_tokens: Positive = 512
    server: ServerSettings | None = None


# The settings of built-in rewards that have others than ScorerSettings.
KINDS: dict[str, type[RewardSettings]] = {"verifier": RewardSettings, "unified_reward": UnifiedRewardSettings}


def settings_of(section: Section, name: str, builtin: Mapping[str, object]) -> RewardSettings:
    """The typed settings of one reward, those that the section leaves out at their defaults; ValueError for what does not fit."""
    kind = KINDS.get(name, ScorerSettings) if name in builtin else OwnReward
    if kind is OwnReward and "class" not in section.get(name, {}):
        raise ValueError(
            f"rewards.{name}: one of your own needs `class: package.module:Class`; built in are {', '.join(builtin)}"
        )
    try:
        return kind.model_validate_json(json.dumps(section.get(name, {})))
    except ValidationError as error:
        raise ValueError(f"rewards.{name}.{first_problem(error, kind)}") from None
