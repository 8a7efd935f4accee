"""A whole profile: all sections, checked against each other.

The settings of each section are beside the code that they configure.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from g2rpo_core.algorithm.matching import MatchingSettings
from g2rpo_core.algorithm.methods import CLIP_RANGES, METHODS, Method
from g2rpo_core.config.drawn import bases_for
from g2rpo_core.data.settings import EmbedSettings, PromptSettings
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.runs import BASE, is_base
from g2rpo_core.foundation.settings import EntryName, Name, Settings, do_not_fit, problems_of
from g2rpo_core.hub.settings import HubModels, HubPrompts, PublishedModel
from g2rpo_core.numerics.pins import Numerics
from g2rpo_core.rewards.registry import (
    ALIASES,
    REWARDS,
    models_of,
    settings_of,
)
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.tasks import SIZES, TASK_NAMES
from g2rpo_core.tiny_models.settings import TOKEN, BuiltModels
from g2rpo_core.training.settings import RunSettings, TrainingSettings

S = TypeVar("S", bound=Settings)
PUBLISHED_TOKEN = 16  # pixels: the side of an image token of published models


class MethodRun(Settings):
    """One entry of section `methods`: changes to published settings and two sections.

    The entry's name is also that of its runs.
    """

    method: str | None = Field(
        None, description="A published method; null: that of the entry's name."
    )
    label: str | None = Field(None, description="Name in reports.")
    settings: dict[str, Any] = Field(
        {}, description="Replaces the method's own settings, by part: tree, credit, objective."
    )
    sampling: dict[str, object] = Field(
        {}, description="Replaces settings of the section `sampling`."
    )
    training: dict[str, object] = Field(
        {},
        description=(
            "Replaces settings of the section `training`, in which a method's published clip_range "
            "already replaces the profile's."
        ),
    )


@dataclass(frozen=True)
class ResolvedRun(RunSettings):
    """One entry of section `methods` with all its settings in place."""

    name: str
    """Of the entry, and of its runs before the seed."""
    label: str | None
    """In reports; None: that of the published method."""
    published: str
    """The published method that it changes."""


def sampling_of(
    name: str,
    own: SamplingSettings,
    runs: Mapping[str, ResolvedRun],
    published: Mapping[str, PublishedModel],
) -> SamplingSettings:
    """Return the settings that draw the images of an entry of `methods` or `published`.

    For any other name, the profile's own. Published weights have those of the entry of their
    method, if there is one of its name.
    """
    if name in published:
        name = published[name].method or name
    return runs[name].sampling if name in runs else own


class Profile(Settings):
    """A whole profile, checked across its sections."""

    numerics: Numerics = Field(
        "native",
        description=(
            "`portable`: every x86-64 processor with AVX2 computes the same bits on the CPU, with "
            "one thread; `native`: as fast as this machine can, as published weights and GPUs "
            "need; `deterministic`: as native, with bitwise deterministic GPU runs, more slowly"
        ),
    )
    models: Annotated[BuiltModels | HubModels, Field(discriminator="source")]
    prompts: PromptSettings
    embed: EmbedSettings
    sampling: SamplingSettings
    rewards: dict[Name, dict[str, object]] = Field(
        {}, description="Settings of built-in rewards, and the user's own rewards."
    )
    training: TrainingSettings
    methods: dict[EntryName, MethodRun] = Field(min_length=1)
    evaluation: EvaluationSettings
    published: dict[Name, PublishedModel] = Field(
        {}, description="Published weights, evaluated if params.yaml names them."
    )

    _runs: dict[str, ResolvedRun] = PrivateAttr(default_factory=dict)

    def run(self, name: str) -> ResolvedRun:
        """Return an entry of section `methods` with all its settings in place."""
        return self._runs[name]

    def sampling_of(self, name: str) -> SamplingSettings:
        """Return the settings that draw the images of a name, by the function `sampling_of`."""
        return sampling_of(name, self.sampling, self._runs, self.published)

    def drawn(
        self, methods: Iterable[str] | None = None, published: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return how evaluations draw, as JSON values: entries by name, and `base`'s ways.

        methods, published: that are evaluated together, for `base`, once for each way of these;
        methods None: all entries.
        """
        named = [
            self.sampling_of(name)
            for name in (*(self.methods if methods is None else methods), *published)
        ]
        return {
            "methods": {name: self.sampling_of(name).drawn for name in self.methods},
            "published": {name: self.sampling_of(name).drawn for name in self.published},
            "base": [each.drawn for each in bases_for(self.sampling, named).values()],
        }

    def changed(self, **sections: object) -> Self:
        """Return this profile with other sections; ValidationError if they do not fit together."""
        return type(self).model_validate({**dict(self), **sections})

    @model_validator(mode="after")
    def _fits_together(self):
        problems = list(dict.fromkeys(self._problems()))
        if problems:
            raise do_not_fit(problems)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield everything that does not fit together, each problem once."""
        if self.models.source == "hub":
            yield from _problems_of_repos(self.models)
        else:
            for part in ("train", "test"):
                if (
                    task := getattr(self.prompts, part)
                ) in TASK_NAMES and task != self.models.source:
                    yield (
                        f"prompts.{part}: models of {self.models.source} "
                        f"do not know the words of {task}: ask for {self.models.source}"
                    )
        for reward in self.rewards:
            if reward in IMAGE_STATS:
                yield (
                    f"rewards.{reward}: evaluations already measure "
                    "an image statistic of this name; choose another name"
                )
            yield from attempt(partial(settings_of, self.rewards, reward), ValueError)[1]
        yield from self._problems_of_training("training", self.training)
        for name, entry in self.methods.items():
            yield from self._problems_of_entry(name, entry)
        yield from self._problems_of_rewards(
            "evaluation.rewards", self.evaluation.rewards, self.prompts.test
        )
        yield from self._problems_of_size("evaluation", self.evaluation)
        yield from self._problems_of_size("sampling", self.sampling)
        yield from self._problems_of_task("evaluation", self.evaluation, self.evaluation.rewards)
        for name, model in self.published.items():
            yield from self._problems_of_published(name, model)

    def _problems_of_published(self, name: str, model: PublishedModel) -> Iterator[str]:
        where = f"published.{name}"
        if name in self.methods or is_base(name):
            yield f"{where}: is the name of a method; choose another name"
        for reward in model.trained_on:
            if reward not in self.evaluation.rewards:
                yield f"{where}.trained_on: {reward!r} is not among evaluation.rewards"
        if model.method is not None and model.method not in METHODS:
            yield (
                f"{where}.method: unknown method {model.method!r}; allowed are {', '.join(METHODS)}"
            )

    def _problems_of_entry(self, name: str, entry: MethodRun) -> Iterator[str]:
        """Yield problems of an entry of `methods`; one without any is resolved from then on."""
        where, published = f"methods.{name}", entry.method or name
        if name == BASE[0]:
            yield f"{where}: is the name of the model before training; choose another name"
        # Each part by itself
        own = {"clip_range": CLIP_RANGES[published]} if published in CLIP_RANGES else {}
        training, problems = attempt(
            partial(_changed, f"{where}.training", self.training, own | entry.training), ValueError
        )
        yield from problems
        sampling, problems = attempt(
            partial(_changed, f"{where}.sampling", self.sampling, entry.sampling), ValueError
        )
        yield from problems
        method, problems = attempt(
            partial(_changed_method, where, published, entry.settings), ValueError
        )
        yield from problems
        # The parts together
        if training:
            yield from self._problems_of_training(f"{where}.training", training)
            if late := [
                iteration for iteration in training.snapshots if iteration > training.iterations
            ]:
                yield (
                    f"{where}: training.snapshots: {late[0]} is beyond training.iterations, "
                    f"{training.iterations}"
                )
            if unkept := [
                kept
                for kept in self.evaluation.checkpoints
                if kept not in ("final", *training.snapshots)
            ]:
                yield (
                    f"{where}: evaluation.checkpoints: {unkept[0]} is not among training.snapshots"
                )
        if sampling and entry.sampling:
            yield from self._problems_of_size(f"{where}.sampling", sampling)
        if method and sampling:
            yield from _problems_of_steps(where, method, sampling.steps)
        if method and training and (problem := method.group_problem(training.num_generations)):
            yield f"{where}: {problem}: change training.num_generations, initial_noises or splits"
        if (
            sampling
            and sampling.quantize
            and training
            and (training.lora is None or training.processes != 1)
        ):
            yield (
                "sampling.quantize: is for a LoRA on one GPU: "
                "set training.lora and training.processes: 1, or sampling.quantize: null"
            )
        if method and sampling and training:
            yield from self._problems_of_task(
                f"{where}: sampling", sampling, (*training.rewards, *training.monitor.rewards)
            )
            self._runs[name] = ResolvedRun(method, sampling, training, name, entry.label, published)

    def _problems_of_training(self, where: str, training: TrainingSettings) -> Iterator[str]:
        """Yield problems of the section, also with a method's changes; its own come once."""
        own = training is self.training
        if own or training.rewards != self.training.rewards:
            yield from self._problems_of_rewards(
                f"{where}.rewards", training.rewards, self.prompts.train
            )
        if own or training.monitor != self.training.monitor:
            yield from self._problems_of_rewards(
                f"{where}.monitor.rewards", training.monitor.rewards, self.prompts.test
            )
        # training rewards are also measured on held-out prompts
        if own or training.rewards != self.training.rewards:
            yield from self._problems_of_rewards(
                f"{where}.rewards", training.rewards, self.prompts.test
            )
            unjudged = [name for name in training.rewards if name not in self.evaluation.rewards]
            if unjudged:
                yield (
                    f"{where}.rewards: {unjudged[0]} is not among evaluation.rewards, "
                    "and the report compares by what was trained on: add it there"
                )
        if self.numerics == "portable" and training.parallel.compile:
            yield (
                f"{where}.parallel.compile: compiled code has other bits on every processor: "
                "set it to false, or numerics: native"
            )
        if training.start is not None and training.start not in self.published:
            known = f"only {', '.join(self.published)}" if self.published else "which is empty"
            yield (
                f"{where}.start: {training.start!r} is not in section published, {known}: "
                "name the folder or repository there"
            )
        processes, prompts = training.processes, training.prompts_per_iteration
        if processes != "auto" and prompts % processes:
            yield (
                f"{where}.prompts_per_iteration: {prompts} cannot be shared evenly by {processes} "
                "processes"
            )

    def _problems_of_size(
        self, where: str, settings: SamplingSettings | EvaluationSettings
    ) -> Iterator[str]:
        token = PUBLISHED_TOKEN if self.models.source == "hub" else TOKEN
        if wrong := [
            f"{key} {getattr(settings, key)}"
            for key in ("height", "width")
            if getattr(settings, key) % token
        ]:
            yield f"{where}: height and width must be divisible by {token} (got {', '.join(wrong)})"

    def _problems_of_task(
        self, where: str, settings: SamplingSettings | EvaluationSettings, rewards: Iterable[str]
    ) -> Iterator[str]:
        """Yield which reward of a tiny task cannot score images of this size."""
        exact = [name for name in rewards if name in REWARDS and REWARDS[name].tasks_only]
        sides = {
            SIZES[task] for task in (self.prompts.train, self.prompts.test) if task in TASK_NAMES
        }
        if exact and sides and sides != {settings.height, settings.width}:
            side = " or ".join(map(str, sorted(sides)))
            yield (
                f"{where}: the {exact[0]} only knows images of {side} x {side} pixels (got "
                f"{settings.height} x {settings.width}): "
                "set height and width to it, or remove the reward"
            )

    def _problems_of_rewards(self, where: str, rewards, source: str | HubPrompts) -> Iterator[str]:
        known = dict.fromkeys([*REWARDS, *self.rewards])
        for reward in rewards:
            if reward not in known:
                named = f"; here it is {ALIASES[reward]}" if reward in ALIASES else ""
                yield f"{where}: unknown reward {reward!r}{named}; allowed are {', '.join(known)}"
                continue
            if reward in REWARDS and REWARDS[reward].tasks_only and not isinstance(source, str):
                yield (
                    f"{where}: the {reward} only knows captions of the tasks "
                    f"{', '.join(TASK_NAMES)}, not {source.repo}: remove it"
                )
            models = attempt(partial(models_of, self.rewards, reward), ValueError)[0] or ()
            if self.models.source != "hub":
                if models and models[0] not in type(self.models).model_fields:
                    yield (
                        f"{where}: {reward} has no small model that is built here: "
                        f"set rewards.{reward}.server, use a profile of published "
                        "models, or remove it"
                    )
                elif models and not self.models.fit_of(models[0]):
                    yield (
                        f"{where}: {models[0]} is not built: "
                        f"say in models.{models[0]} how it is trained, or remove {reward}"
                    )
            elif lacking := [model for model in models if model not in self.models.repos]:
                yield f"{where}: {reward} needs {' and '.join(lacking)} in models.repos"


def _problems_of_repos(models: HubModels) -> Iterator[str]:
    """Yield problems of `models.repos`: a model that nothing reads, or a missing architecture."""
    known = dict.fromkeys(
        ["pipeline", *(model for spec in REWARDS.values() for model in spec.models)]
    )
    for name in models.repos:
        if name not in known:
            yield f"models.repos.{name}: unknown model; allowed are {', '.join(known)}"
    for name in dict.fromkeys(model for spec in REWARDS.values() for model in spec.open_clip):
        if name in models.repos and models.repos[name].architecture is None:
            yield (
                f"models.repos.{name}: needs `architecture`, its name in open_clip, "
                "such as ViT-H-14"
            )


def _problems_of_steps(where: str, method: Method, steps: int) -> Iterator[str]:
    """Yield problems of a method's SDE steps with T = steps."""
    if (last := method.tree.last_step(steps)) > steps - 1:
        yield (
            f"{where}: SDE step {method.tree.candidates(steps)[-1]} "
            f"needs sampling.steps of at least {last + 1}, "
            f"because the last step is deterministic (got {steps})"
        )
    if beyond := [
        step
        for step in method.tree.split_steps() or ()
        if step not in method.tree.candidates(steps)
    ]:
        yield f"{where}: splits: step {beyond[0]} is no SDE step of {steps} steps"


def _changed(where: str, section: S, changes: dict[str, object]) -> S:
    """Return a section with an entry's changes; ValueError if they do not fit."""
    return _validated(where, type(section), section.model_dump(mode="json") | changes)


def _changed_method(where: str, published: str, changes: dict[str, Any]) -> Method:
    """Return a published method with an entry's changes; ValueError if unknown or misfit."""
    if published not in METHODS:
        raise ValueError(
            f"{where}: unknown method {published!r}; allowed are {', '.join(METHODS)} (an entry "
            "with another name needs `method:`)"
        )
    method = _validated(f"{where}.settings", Method, METHODS[published].changes(**changes))
    own, theirs = method.objective, METHODS[published].objective
    if (
        isinstance(own, MatchingSettings)
        and isinstance(theirs, MatchingSettings)
        and own.trust != theirs.trust
        and not own.trust_acts
    ):
        raise ValueError(
            f"{where}.settings.objective.trust: has no effect: with one update an iteration and no "
            "slow copy (old) the velocity is its own anchor. Leave it out, or set "
            "updates_per_rollout above 1, old, or anchor: base"
        )
    return method


def _validated(where: str, schema: type[S], data: dict[str, object]) -> S:
    """Validate settings from JSON values; ValueError with all problems, as `where.key: problem`."""
    try:
        return schema.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise ValueError(
            "; ".join(f"{where}.{problem}" for problem in problems_of(error, schema))
        ) from None
