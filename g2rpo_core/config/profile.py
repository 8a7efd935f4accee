"""A whole profile: all sections, checked against each other. Each section's settings are beside the code that they configure."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError, model_validator

from g2rpo_core.algorithm.methods import METHODS, Method
from g2rpo_core.common.runs import BASE
from g2rpo_core.data.settings import EmbedSettings, PromptSettings
from g2rpo_core.errors import attempt
from g2rpo_core.evaluation.image_stats import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.hub.settings import HubModels, HubPrompts, PublishedModel
from g2rpo_core.rewards.registry import REWARDS, models_of, settings_of
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.settings import Name, Settings, do_not_fit, problems_of
from g2rpo_core.tiny_models.settings import TOKEN, BuiltModels
from g2rpo_core.training.settings import TrainingSettings
from g2rpo_core.worlds.names import WORLD_NAMES

S = TypeVar("S", bound=Settings)
T = TypeVar("T")
PUBLISHED_TOKEN = 16  # pixels: the side of an image token of published models


class MethodRun(Settings):
    """One entry of section `methods`: its changes to the published settings and to two sections of the profile.

    The entry's name is also that of its runs.
    """

    method: str | None = Field(None, description="a published method; null: that of the entry's name")
    label: str | None = Field(None, description="its name in reports")
    settings: dict[str, object] = Field({}, description="that replace the method's own")
    sampling: dict[str, object] = Field({}, description="that replace the section `sampling`")
    training: dict[str, object] = Field({}, description="that replace the section `training`")


class Profile(Settings):
    """A whole profile, checked across its sections."""

    models: Annotated[BuiltModels | HubModels, Field(discriminator="source")]
    prompts: PromptSettings
    embed: EmbedSettings
    sampling: SamplingSettings
    rewards: dict[Name, dict[str, object]] = Field({}, description="settings of built-in rewards, and the user's own rewards")
    training: TrainingSettings
    methods: dict[Name, MethodRun] = Field(min_length=1)
    evaluation: EvaluationSettings
    published: dict[Name, PublishedModel] = Field({}, description="published weights, evaluated if params.yaml names them")

    @model_validator(mode="after")
    def _fits_together(self):
        problems = list(dict.fromkeys(self._problems()))
        if problems:
            raise do_not_fit(problems)
        return self

    def _problems(self) -> Iterator[str]:
        """Everything that does not fit together, each problem once."""
        if self.models.source == "hub":
            yield from _problems_of_repos(self.models)
        else:
            for part in ("train", "test"):
                if (world := getattr(self.prompts, part)) in WORLD_NAMES and world != self.models.source:
                    yield f"prompts.{part}: models of {self.models.source} do not know the words of {world}: ask for {self.models.source}"
        for reward in self.rewards:
            if reward in IMAGE_STATS:
                yield f"rewards.{reward}: evaluations already measure an image statistic of this name; choose another name"
            yield from attempt(partial(settings_of, self.rewards, reward), ValueError)[1]
        sections = [("training", self.training)]
        for name in self.methods:
            yield from self._problems_of_method(name)
            if found := attempt(partial(training_of, self.training, self.methods, name), ValueError)[0]:
                sections.append((f"methods.{name}.training", found))
        for where, training in sections:
            yield from self._problems_of_training(where, training)
        yield from self._problems_of_rewards("evaluation.rewards", self.evaluation.rewards, self.prompts.test)
        yield from self._problems_of_size("evaluation", self.evaluation)
        yield from self._problems_of_size("sampling", self.sampling)
        for name, model in self.published.items():
            yield from self._problems_of_published(name, model)

    def _problems_of_published(self, name: str, model: PublishedModel) -> Iterator[str]:
        where = f"published.{name}"
        if name in self.methods or name == BASE[0]:
            yield f"{where}: is the name of a method; choose another name"
        for reward in model.trained_on:
            if reward not in self.evaluation.rewards:
                yield f"{where}.trained_on: {reward!r} is not among evaluation.rewards"
        if model.method is not None and model.method not in METHODS:
            yield f"{where}.method: unknown method {model.method!r}; allowed are {', '.join(METHODS)}"

    def _problems_of_method(self, name: str) -> Iterator[str]:
        if name == BASE[0]:
            yield f"methods.{name}: is the name of the model before training; choose another name"
        training, problems = attempt(partial(training_of, self.training, self.methods, name), ValueError)
        yield from problems
        sampling, problems = attempt(partial(sampling_of, self.sampling, self.methods, name), ValueError)
        yield from problems
        method, problems = attempt(partial(method_of, self.methods, name), ValueError)
        yield from problems
        if training:
            if late := [iteration for iteration in training.snapshots if iteration > training.iterations]:
                yield f"methods.{name}: training.snapshots: {late[0]} is beyond training.iterations, {training.iterations}"
            if unkept := [kept for kept in self.evaluation.checkpoints if kept not in ("final", *training.snapshots)]:
                yield f"methods.{name}: evaluation.checkpoints: {unkept[0]} is not among training.snapshots"
        if method and sampling:
            steps, last = sampling.steps, method.last_step(sampling.steps)
            if last > steps - 1:
                yield (
                    f"methods.{name}: SDE step {method.candidates(steps)[-1]} needs sampling.steps of at least {last + 1}, because the "
                    f"last step is deterministic (got {steps})"
                )
            if beyond := [step for step in method.splits or () if step not in method.candidates(steps)]:
                yield f"methods.{name}: splits: step {beyond[0]} is no SDE step of {steps} steps"
            if self.methods[name].sampling:
                yield from self._problems_of_size(f"methods.{name}.sampling", sampling)
        if method and training and (problem := method.group_problem(training.num_generations)):
            yield f"methods.{name}: {problem}: change training.num_generations, initial_noises or splits"

    def _problems_of_training(self, where: str, training: TrainingSettings) -> Iterator[str]:
        """Problems of the section, or of the section with a method's changes; the section's own problems are reported once."""
        own = training is self.training
        if own or training.rewards != self.training.rewards:
            yield from self._problems_of_rewards(f"{where}.rewards", training.rewards, self.prompts.train)
        if own or training.monitor != self.training.monitor:
            yield from self._problems_of_rewards(f"{where}.monitor.rewards", training.monitor.rewards, self.prompts.test)
        # training rewards are also measured on held-out prompts
        if own or training.rewards != self.training.rewards:
            yield from self._problems_of_rewards(f"{where}.rewards", training.rewards, self.prompts.test)
        processes, prompts = training.processes, training.prompts_per_iteration
        if processes != "auto" and prompts % processes:
            yield f"{where}.prompts_per_iteration: {prompts} cannot be shared evenly by {processes} processes"

    def _problems_of_size(self, where: str, settings: SamplingSettings | EvaluationSettings) -> Iterator[str]:
        token = PUBLISHED_TOKEN if self.models.source == "hub" else TOKEN
        if wrong := [f"{key} {getattr(settings, key)}" for key in ("height", "width") if getattr(settings, key) % token]:
            yield f"{where}: height and width must be divisible by {token} (got {', '.join(wrong)})"

    def _problems_of_rewards(self, where: str, rewards, source: str | HubPrompts) -> Iterator[str]:
        known = dict.fromkeys([*REWARDS, *self.rewards])
        for reward in rewards:
            if reward not in known:
                yield f"{where}: unknown reward {reward!r}; allowed are {', '.join(known)}"
                continue
            if reward in REWARDS and REWARDS[reward].worlds_only and source not in WORLD_NAMES:
                named = source if isinstance(source, str) else source.repo
                yield f"{where}: the {reward} only knows captions of {' and '.join(WORLD_NAMES)}, not {named}: remove it"
            models = attempt(partial(models_of, self.rewards, reward), ValueError)[0] or ()
            if self.models.source != "hub":
                if models and not self.models.fit_of(reward):
                    yield f"{where}: {reward} is not built: say in models.{reward} how it is trained, or remove it"
            elif lacking := [model for model in models if model not in self.models.repos]:
                yield f"{where}: {reward} needs {' and '.join(lacking)} in models.repos"


def _problems_of_repos(models: HubModels) -> Iterator[str]:
    """Problems of `models.repos`: a model that nothing reads, or an open_clip checkpoint without its architecture."""
    known = dict.fromkeys(["pipeline", *(model for spec in REWARDS.values() for model in spec.models)])
    for name in models.repos:
        if name not in known:
            yield f"models.repos.{name}: unknown model; allowed are {', '.join(known)}"
    for name in dict.fromkeys(model for spec in REWARDS.values() for model in spec.open_clip):
        if name in models.repos and models.repos[name].architecture is None:
            yield f"models.repos.{name}: needs `architecture`, its name in open_clip, such as ViT-H-14"


def method_of(methods: dict[str, MethodRun], name: str) -> Method:
    """The published settings of a method with the profile's changes; ValueError if they do not fit."""
    method = methods[name].method or name
    if method not in METHODS:
        raise ValueError(
            f"methods.{name}: unknown method {method!r}; allowed are {', '.join(METHODS)} (an entry with another name needs `method:`)"
        )
    return _override(METHODS[method], methods[name].settings, f"methods.{name}.settings")


def sampling_of(sampling: SamplingSettings, methods: dict[str, MethodRun], name: str) -> SamplingSettings:
    """The section `sampling` with a method's changes; ValueError if they do not fit."""
    return _override(sampling, methods[name].sampling, f"methods.{name}.sampling")


def training_of(training: TrainingSettings, methods: dict[str, MethodRun], name: str) -> TrainingSettings:
    """The section `training` with a method's changes; ValueError if they do not fit."""
    return _override(training, methods[name].training, f"methods.{name}.training")


def _override(settings: S, changes: dict[str, object], where: str) -> S:
    try:
        return type(settings).model_validate_json(json.dumps({**settings.model_dump(mode="json"), **changes}))
    except ValidationError as error:
        raise ValueError("; ".join(f"{where}.{problem}" for problem in problems_of(error, type(settings)))) from None
