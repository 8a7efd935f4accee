"""A whole profile: the sections together, checked across each other. Each section's settings live beside what they set."""

import json
import re
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError, model_validator

from g2rpo_core.algorithm.methods import METHODS, Method
from g2rpo_core.common.runs import BASE
from g2rpo_core.data.settings import EmbedSettings, PromptSettings
from g2rpo_core.evaluation.image_stats import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.hub.settings import HubModels, HubPrompts, PublishedModel
from g2rpo_core.rewards.registry import REWARDS, models_of, settings_of
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.settings import Settings, first_problem
from g2rpo_core.tiny_models.settings import ShapesModels
from g2rpo_core.training.settings import TrainingSettings

S = TypeVar("S", bound=Settings)


class MethodRun(Settings):
    """One entry of section `methods`: where it departs from the published settings, and from two sections of the profile.

    The entry's name is that of its runs. `method`: a name of METHODS, that of the entry if it is left out; `label`: in reports.
    """

    method: str | None = None
    label: str | None = None
    settings: dict[str, object] = {}
    sampling: dict[str, object] = {}
    training: dict[str, object] = {}


class Profile(Settings):
    """A whole profile, checked across its sections."""

    models: Annotated[ShapesModels | HubModels, Field(discriminator="source")]
    prompts: PromptSettings
    embed: EmbedSettings
    sampling: SamplingSettings
    rewards: dict[str, dict[str, object]] = Field({}, description="settings of built-in rewards, and rewards of the user's own")
    training: TrainingSettings
    methods: dict[str, MethodRun] = Field(min_length=1)
    evaluation: EvaluationSettings
    published: dict[str, PublishedModel] = Field({}, description="weights of others, evaluated where params.yaml names them")

    @model_validator(mode="after")
    def _fits_together(self):
        if self.models.source == "hub":
            _check_repos(self.models)
        for name in self.methods:
            self._check_method(name)
        for reward in self.rewards:
            if reward in IMAGE_STATS:
                raise ValueError(f"rewards.{reward}: evaluations measure this of every image already; give it another name")
            settings_of(self.rewards, reward)
        for section, rewards, source in (
            ("training", self.training.rewards, self.prompts.train),
            ("training.monitor", self.training.monitor.rewards, self.prompts.test),
            ("evaluation", self.evaluation.rewards, self.prompts.test),
        ):
            for reward in rewards:
                self._check_reward(f"{section}.rewards", reward, source)
        for name, model in self.published.items():
            self._check_published(name, model)
        return self

    def _check_published(self, name: str, model: PublishedModel) -> None:
        where = f"published.{name}"
        if name in self.methods or name == BASE[0] or not re.fullmatch(r"[A-Za-z]\w*", name):
            raise ValueError(f"{where}: give it a name of letters, digits and _ that no method has")
        if strange := [reward for reward in model.trained_on if reward not in self.evaluation.rewards]:
            raise ValueError(f"{where}.trained_on: {strange[0]!r} is not among evaluation.rewards")
        if model.method is not None and model.method not in METHODS:
            raise ValueError(f"{where}.method: unknown method {model.method!r}; allowed are {', '.join(METHODS)}")

    def _check_method(self, name: str) -> None:
        training = training_of(self.training, self.methods, name)
        if late := [iteration for iteration in training.snapshots if iteration > training.iterations]:
            raise ValueError(
                f"methods.{name}: training.snapshots: {late[0]} is beyond training.iterations, {training.iterations}"
            )
        if unkept := [kept for kept in self.evaluation.checkpoints if kept not in ("final", *training.snapshots)]:
            raise ValueError(f"methods.{name}: evaluation.checkpoints: {unkept[0]} is not among training.snapshots")
        steps = sampling_of(self.sampling, self.methods, name).steps
        last = method_of(self.methods, name).candidates(steps)[-1]
        if last > steps - 2:
            raise ValueError(
                f"methods.{name}: SDE step {last} needs sampling.steps of at least {last + 2}, as the last step is "
                f"deterministic (got {steps})"
            )

    def _check_reward(self, where: str, reward: str, source: str | HubPrompts) -> None:
        known = dict.fromkeys([*REWARDS, *self.rewards])
        if reward not in known:
            raise ValueError(f"{where}: unknown reward {reward!r}; allowed are {', '.join(known)}")
        if reward in REWARDS and REWARDS[reward].shapes_only and source != "shapes":
            named = source if isinstance(source, str) else source.repo
            raise ValueError(f"{where}: the {reward} knows captions of the shapes task alone, not {named}")
        if self.models.source != "hub":
            return
        if lacking := [model for model in models_of(self.rewards, reward) if model not in self.models.repos]:
            raise ValueError(f"{where}: {reward} needs {' and '.join(lacking)} in models.repos")


def _check_repos(models: HubModels) -> None:
    """ValueError for a model that nothing reads, or an open_clip checkpoint whose architecture is not named."""
    known = dict.fromkeys(["pipeline", *(model for spec in REWARDS.values() for model in spec.models)])
    for name in models.repos:
        if name not in known:
            raise ValueError(f"models.repos.{name}: unknown model; allowed are {', '.join(known)}")
    for name in dict.fromkeys(model for spec in REWARDS.values() for model in spec.open_clip):
        if name in models.repos and models.repos[name].architecture is None:
            raise ValueError(f"models.repos.{name}: needs `architecture`, open_clip's name of it, such as ViT-H-14")


def method_of(methods: dict[str, MethodRun], name: str) -> Method:
    """The published settings of a method with the profile's departures; ValueError for what does not fit."""
    method = methods[name].method or name
    if method not in METHODS:
        raise ValueError(
            f"methods.{name}: unknown method {method!r}; allowed are {', '.join(METHODS)} (an entry of another name says `method:`)"
        )
    return _override(METHODS[method], methods[name].settings, f"methods.{name}.settings")


def sampling_of(sampling: SamplingSettings, methods: dict[str, MethodRun], name: str) -> SamplingSettings:
    """The section `sampling` with a method's departures; ValueError for what does not fit."""
    return _override(sampling, methods[name].sampling, f"methods.{name}.sampling")


def training_of(training: TrainingSettings, methods: dict[str, MethodRun], name: str) -> TrainingSettings:
    """The section `training` with a method's departures; ValueError for what does not fit."""
    return _override(training, methods[name].training, f"methods.{name}.training")


def _override(settings: S, changes: dict[str, object], where: str) -> S:
    try:
        return type(settings).model_validate_json(json.dumps({**settings.model_dump(mode="json"), **changes}))
    except ValidationError as error:
        raise ValueError(f"{where}.{first_problem(error, type(settings))}") from None
