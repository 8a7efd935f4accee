"""Typed profiles: everything that decides a run, checked as a whole before any work.

A profile is `profiles/<name>.yaml`, read as YAML 1.2 (as DVC reads it; YAML 1.1 takes 1e-5 for a text). A stage loads only the
sections that it declares to DVC, so that an undeclared parameter is an error and not a rerun that silently does not happen.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from .errors import UserError
from .looks import LABELS as LOOKS
from .methods import METHODS, Method
from .rewards import MODELS, REWARDS
from .rewards.settings import settings_of
from .settings import Settings, first_problem

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class FitSettings(Settings):
    """How long a tiny model is trained: optimizer steps, pictures a step, peak learning rate."""

    steps: Positive
    batch: Positive
    learning_rate: Rate


class ShapesModels(Settings):
    """Models built and trained here on the shape world."""

    source: Literal["shapes"]
    seed: int
    pictures: Positive
    vae: FitSettings
    flux: FitSettings
    clip_score: FitSettings
    hps: FitSettings
    pickscore: FitSettings
    image_reward: FitSettings
    unified_reward: FitSettings


class HubModel(Settings):
    """One published model. files: patterns of the files to have; sha256: of those whose content must be the known one."""

    repo: str = Field(pattern=r"^[^/\s]+/[^/\s]+$")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$", description="a full commit, as branches move")
    files: tuple[str, ...] = Field(min_length=1)
    sha256: dict[str, str] = {}
    architecture: str | None = Field(None, description="open_clip's name of the architecture, for checkpoints without one")


class HubModels(Settings):
    """Published models from the Hugging Face hub."""

    source: Literal["hub"]
    repos: dict[
        Literal[
            "pipeline", "hps", "clip_score", "pickscore", "pickscore_processor", "image_reward", "image_reward_tokenizer", "unified_reward",
        ],
        HubModel,
    ]  # fmt: skip

    @model_validator(mode="after")
    def _complete(self):
        if "pipeline" not in self.repos:
            raise ValueError("repos: needs `pipeline`, the text-to-image model")
        if "hps" in self.repos and self.repos["hps"].architecture is None:
            raise ValueError("repos.hps: needs `architecture`, open_clip's name of it: ViT-H-14 for the published HPS-v2.1")
        return self


class PromptSettings(Settings):
    """Where prompts come from; `shapes` or a file of txt, csv, jsonl or parquet, for each of the two sets."""

    train: str
    train_count: Positive
    test: str
    test_count: Positive
    seed: int


class EmbedSettings(Settings):
    max_sequence_length: int = Field(ge=1, le=512, description="T5 tokens, padding included: FLUX attends to it")
    dtype: Literal["float32", "bfloat16"]
    batch: Positive
    shard_rows: Positive


class SamplingSettings(Settings):
    """How pictures are sampled in training: T steps, shift of the noise levels, pixels, FLUX's guidance scale."""

    steps: int = Field(ge=2)
    shift: Rate
    height: Positive
    width: Positive
    guidance: float = Field(ge=0)
    dtype: Literal["float32", "bfloat16"] = Field(description="of the transformer's computation; weights stay float32")
    batch_tokens: Positive = Field(
        description="picture and text tokens in one call of the transformer, if one latent has no more"
    )
    decode_batch: Positive = Field(description="pictures in one call of the VAE")


class Adapter(Settings):
    """A low-rank adapter (LoRA, arXiv 2106.09685) of the transformer: rank, scale alpha / rank, and the layers that get one."""

    rank: Positive
    alpha: Rate
    targets: tuple[str, ...] = Field(
        ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        min_length=1,
        description="ends of module names; the attention's projections as diffusers' FLUX recipe has them",
    )


class MonitorSettings(Settings):
    """What is measured on held-out prompts while training: every so many iterations, on so many prompts, by which rewards."""

    every: Positive
    prompts: Positive
    rewards: tuple[str, ...]


class CheckpointSettings(Settings):
    """When a run writes where it is, so that it can go on from there; it always does on SIGTERM."""

    every: Positive = Field(10, description="iterations")
    keep: Positive = Field(1, description="how many of the newest stay on disk; all go when the run is finished")


class ParallelSettings(Settings):
    """How a model that is too large or too slow for one GPU is trained."""

    compile: bool = Field(False, description="compile every block")
    shard_size: Positive | None = Field(
        None, description="processes over which weights are sharded, with a copy in each such group; null: all"
    )
    replica: bool = Field(False, description="a whole copy of the weights for rollouts, in the dtype of the computation")


Processes = Positive | Literal["auto"]


class TrainingSettings(Settings):
    iterations: Positive
    prompts_per_iteration: Positive
    group_size: int = Field(ge=2)
    batch_tokens: Positive = Field(description="as sampling.batch_tokens, for a forward and backward")
    rewards: dict[str, float] = Field(min_length=1, description="name: weight of its advantage")
    learning_rate: Rate
    schedule: Literal["constant", "linear"] = Field(
        description="of the learning rate: the paper's is constant; linear falls to 0"
    )
    weight_decay: float = Field(ge=0)
    max_grad_norm: Rate
    clip_range: Rate
    advantage_clip: Rate
    monitor: MonitorSettings
    adapter: Adapter | None = Field(None, description="train a LoRA beside frozen weights; null: all weights")
    checkpointing: bool = Field(False, description="recompute activations in the backward pass instead of keeping them")
    max_ratio_drift: Rate = Field(1.0e-2, description="largest |ratio - 1| before an iteration's first update that is no error")
    checkpoints: CheckpointSettings = CheckpointSettings()
    snapshots: tuple[Positive, ...] = Field((), description="iterations whose weights are kept beside the last, for evaluation")
    parallel: ParallelSettings = ParallelSettings()
    processes: Processes = Field(1, description="of torchrun, on all nodes together; auto: one for each GPU")


class DiversitySettings(Settings):
    """How the diversity within a prompt is measured: on so many of the first prompts, with so many noises each."""

    prompts: Positive
    noises: int = Field(ge=2)


class EvaluationSettings(Settings):
    steps: tuple[Positive, ...] = Field(min_length=1, description="numbers of steps; reports are about the first")
    height: Positive
    width: Positive
    rewards: tuple[str, ...] = Field(min_length=1)
    seed: int
    batch: Positive
    checkpoints: tuple[Literal["final"] | Positive, ...] = Field(
        ("final",),
        min_length=1,
        description="of every run: the last weights, or iterations of training.snapshots; reports are about the first",
    )
    diversity: DiversitySettings | None = Field(None, description="null: it is not measured")
    trained_share: float = Field(
        1.0, ge=0, le=1, description="share of the steps, from the noisy end, by the trained weights; the base does the others"
    )
    processes: Processes = Field(1, description="as training.processes")

    @field_validator("steps", "checkpoints")
    @classmethod
    def _different(cls, value):
        if len(set(value)) < len(value):
            raise ValueError("must be different from each other")
        return value


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

    @model_validator(mode="after")
    def _fits_together(self):
        for name in self.methods:
            training = training_of(self.training, self.methods, name)
            if late := [iteration for iteration in training.snapshots if iteration > training.iterations]:
                raise ValueError(
                    f"methods.{name}: training.snapshots: {late[0]} is beyond training.iterations, {training.iterations}"
                )
            if unkept := [one for one in self.evaluation.checkpoints if one not in ("final", *training.snapshots)]:
                raise ValueError(f"methods.{name}: evaluation.checkpoints: {unkept[0]} is not among training.snapshots")
            steps = sampling_of(self.sampling, self.methods, name).steps
            noisy = method_of(self.methods, name).candidates(steps)
            if noisy[-1] > steps - 2:
                raise ValueError(
                    f"methods.{name}: noisy step {noisy[-1]} needs sampling.steps of at least {noisy[-1] + 2}, as the last step is "
                    f"deterministic (got {steps})"
                )
        for reward in self.rewards:
            if reward in LOOKS:
                raise ValueError(f"rewards.{reward}: evaluations measure this of every picture already; give it another name")
            settings_of(self.rewards, reward, REWARDS)
        allowed = dict.fromkeys([*REWARDS, *self.rewards])
        for section, rewards, source in (
            ("training", self.training.rewards, self.prompts.train),
            ("training.monitor", self.training.monitor.rewards, self.prompts.test),
            ("evaluation", self.evaluation.rewards, self.prompts.test),
        ):
            for reward in rewards:
                if reward not in allowed:
                    raise ValueError(f"{section}.rewards: unknown reward {reward!r}; allowed are {', '.join(allowed)}")
                if self.models.source == "hub" and not self.rewards.get(reward, {}).get("server"):
                    lacking = [model for model in MODELS.get(reward, ()) if model not in self.models.repos]
                    if lacking:
                        raise ValueError(f"{section}.rewards: {reward} needs {' and '.join(lacking)} in models.repos")
                if reward == "verifier" and source != "shapes":
                    raise ValueError(f"{section}.rewards: the verifier knows captions of the shape world alone, not {source}")
        return self


def method_of(methods: dict[str, MethodRun], name: str) -> Method:
    """The published settings of a method with the profile's departures; ValueError for what does not fit."""
    method = methods[name].method or name
    if method not in METHODS:
        raise ValueError(f"methods.{name}: unknown method {method!r}; allowed are {', '.join(METHODS)}")
    return _override(METHODS[method], methods[name].settings, f"methods.{name}.settings")


def sampling_of(sampling: SamplingSettings, methods: dict[str, MethodRun], name: str) -> SamplingSettings:
    """The section `sampling` with a method's departures; ValueError for what does not fit."""
    return _override(sampling, methods[name].sampling, f"methods.{name}.sampling")


def training_of(training: TrainingSettings, methods: dict[str, MethodRun], name: str) -> TrainingSettings:
    """The section `training` with a method's departures; ValueError for what does not fit."""
    return _override(training, methods[name].training, f"methods.{name}.training")


def _override(settings, changes: dict[str, object], where: str):
    try:
        return type(settings).model_validate_json(json.dumps({**settings.model_dump(mode="json"), **changes}))
    except ValidationError as error:
        raise ValueError(f"{where}.{first_problem(error, type(settings))}") from None


class Run(Settings):
    """`params.yaml`: which profile, methods and seeds `dvc repro` runs."""

    profile: str
    methods: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)


class Study(Run):
    """`studies/<study>/params.yaml`: runs and a report of their own, by a profile with departures; its models are the profile's."""

    study: str
    title: str
    about: str = Field(description="what is compared and at what budgets, in the report's first lines")
    entries: dict[str, MethodRun] = Field(min_length=1, description="in the place of the profile's section methods")
    changes: dict[Literal["sampling", "rewards", "training", "evaluation"], dict[str, object]] = Field(
        {}, description="laid over these sections of the profile"
    )


def load_profile(path: Path, study: Study | None = None) -> Profile:
    """UserError with file, key and what is allowed, in one line, if the file or anything in it is wrong; study: laid over it."""
    if not path.exists():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise UserError(f"{path}: no such profile; there are {', '.join(known) or 'none in that folder'}")
    if study is None:
        return _load(path, Profile)
    entries = {name: entry.model_dump(mode="json") for name, entry in study.entries.items()}
    return _load(
        path, Profile, lambda data: _laid_over(data, study.changes) | {"methods": entries}, f" with {study_path(study.study)}"
    )


def _laid_over(data: dict, changes: dict) -> dict:
    merged = lambda old, new: _laid_over(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return data | {key: merged(data.get(key), value) for key, value in changes.items()}


def study_path(name: str) -> Path:
    return Path("studies", name, "params.yaml")


def load_study(name: str) -> Study:
    """A study's file, checked with the profile that it names; UserError as `load_profile`."""
    path = study_path(name)
    if not path.exists():
        known = sorted(file.parent.name for file in path.parents[1].glob("*/params.yaml"))
        raise UserError(f"{path}: no such study; there are {', '.join(known) or 'none in that folder'}")
    study = _load(path, Study)
    if study.study != name:
        raise UserError(f"{path}: study: must be the name of its folder, {name} (got {study.study!r})")
    load_profile(profile_path(study.profile), study)
    for method in study.methods:
        if method not in study.entries:
            raise UserError(f"{path}: methods: {method!r} is not in entries; allowed are {', '.join(study.entries)}")
    return study


def load_run(path: Path = Path("params.yaml")) -> Run:
    """`params.yaml`, checked against the profile that it names; UserError as `load_profile`."""
    run = _load(path, Run)
    profile = load_profile(profile_path(run.profile))
    for method in run.methods:
        if method not in profile.methods:
            raise UserError(
                f"{path}: methods: {method!r} is not in profiles/{run.profile}.yaml; allowed are {', '.join(profile.methods)}"
            )
    return run


def profile_path(name: str) -> Path:
    return Path("profiles") / f"{name}.yaml"


def _load(path: Path, kind, change: Callable[[dict], dict] = lambda data: data, beside: str = ""):
    try:
        data = change(YAML(typ="safe", pure=True).load(path.read_text()))
        return kind.model_validate_json(json.dumps(data, default=str))
    except YAMLError as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        raise UserError(f"{path}{beside}: {first_problem(error, kind)}") from None
