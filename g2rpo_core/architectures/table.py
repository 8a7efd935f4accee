"""List all base models, and find the one that a pipeline's folder or a repository holds."""

from pathlib import Path

import transformers
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from g2rpo_core.architectures import flux2, qwen_image, zimage
from g2rpo_core.architectures.architecture import Architecture, Config, ModelShape, Schedule
from g2rpo_core.architectures.flux import Flux
from g2rpo_core.architectures.sd3 import StableDiffusion3
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, read_json, reading, whole
from g2rpo_core.hub.pretrained import load_whole

BASES: tuple[Architecture, ...] = (
    Flux(),
    StableDiffusion3(),
    flux2.ARCHITECTURE,
    zimage.ARCHITECTURE,
    qwen_image.ARCHITECTURE,
)
ARCHITECTURES: dict[str, Architecture] = {base.pipeline.__name__: base for base in BASES}
SCHEDULER = FlowMatchEulerDiscreteScheduler.__name__
UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
    "time_shift_type",  # other than exponential
)
DISTILLED = (
    "is distilled to a few steps without guidance, and training would undo that: "
    "it can only generate"
)


def read_architecture(pipeline: Path) -> Architecture:
    """Look up the base model by the class in model_index.json; UserError if it is unknown."""
    file = pipeline / "model_index.json"
    name = read_json(whole(file), dict).get("_class_name")
    if name not in ARCHITECTURES:
        raise UserError(
            complaint(
                file, f"{name} is no base model that is known here, only {', '.join(ARCHITECTURES)}"
            )
        )
    return ARCHITECTURES[name]


def known_shape(repo: str) -> tuple[Architecture, ModelShape] | None:
    """Return the base model and shape of a published repository; None if it is not known here."""
    return next(
        ((base, base.published[repo]) for base in ARCHITECTURES.values() if repo in base.published),
        None,
    )


def read_shape(pipeline: Path) -> tuple[Architecture, ModelShape]:
    """Read the base model and shape of a pipeline to train; UserError if a configuration is gone.

    Other errors as `read_trainable`.
    """
    base, index = read_trainable(pipeline), read_json(pipeline / "model_index.json", dict)
    config = lambda part: read_json(whole(pipeline / part / "config.json"), dict)
    encoders = {part: (str(index[part][1]), config(part)) for part in base.text_encoders}
    return base, ModelShape(
        config("transformer"), config("vae"), encoders, read_scheduler(pipeline)
    )


def check_trainable(*repos: str | None) -> None:
    """Refuse repositories that are distilled to a few steps; UserError names the one to train."""
    for base in ARCHITECTURES.values():
        if found := base.distilled.keys() & set(repos):
            raise UserError(
                f"models.repos.pipeline: {(repo := min(found))} {DISTILLED}; to train, "
                f"name {base.distilled[repo]}"
            )


def is_distilled(pipeline: Path) -> bool:
    """Tell whether a pipeline's folder says so itself: it then works without guidance."""
    return bool(read_json(pipeline / "model_index.json", dict).get("is_distilled"))


def read_trainable(pipeline: Path) -> Architecture:
    """Look up the base model of a pipeline to train; UserError if unknown or distilled."""
    base = read_architecture(pipeline)
    if is_distilled(pipeline):
        raise UserError(f"{pipeline}: {DISTILLED}; to train, take the model that it was made from")
    return base


def check_sampling(pipeline: Path, guidance: float) -> None:
    """Refuse guidance where a distilled pipeline would ignore it; UserError says what to set.

    Also as `read_scheduler`.
    """
    base = read_architecture(pipeline)
    read_scheduler(pipeline)
    if base.forward_evals(guidance) > 1 and is_distilled(pipeline):
        raise UserError(
            f"sampling.guidance: {pipeline} is distilled to work without, and its own pipeline "
            f"ignores a guidance of {guidance:g}: set it to {2 - base.forward_evals(1)}"
        )


def known_repos() -> list[str]:
    """Return the repositories whose shape is known."""
    return [repo for base in ARCHITECTURES.values() for repo in base.published]


def text_encoders(pipeline: Path, **options: object) -> DiffusionPipeline:
    """Load the pipeline without transformer and VAE; UserError if a part or weight is missing.

    options: of the encoders' `from_pretrained`.
    """
    base = read_architecture(pipeline)
    index = read_json(pipeline / "model_index.json", dict)
    if lacking := [
        part for part in (*base.text_encoders, *base.tokenizers) if None in index.get(part, [None])
    ]:
        reason = (
            f"has no {', '.join(lacking)}: {base.label} encodes its prompts with all of "
            f"{', '.join(base.text_encoders)}"
        )
        raise UserError(complaint(pipeline, reason))
    with reading(pipeline):
        encoders = {part: getattr(transformers, index[part][1]) for part in base.text_encoders}
    loaded = {part: load_whole(kind, pipeline / part, **options) for part, kind in encoders.items()}
    with reading(pipeline):
        return base.pipeline.from_pretrained(pipeline, transformer=None, vae=None, **loaded)


def read_scheduler(pipeline: Path) -> Config:
    """Read the configuration of a pipeline's scheduler.

    UserError for one of another class, or whose sigmas or steps are not computed here.
    """
    file = whole(pipeline / "scheduler" / "scheduler_config.json")
    stored = read_json(file, dict)
    entry = read_json(pipeline / "model_index.json", dict).get("scheduler") or [None]
    if others := {stored.get("_class_name"), entry[-1]} - {None, SCHEDULER}:
        raise UserError(
            f"{file}: is sampled by {min(others)}, here only {SCHEDULER}: "
            "take a pipeline with that one"
        )
    with reading(file):
        config = FlowMatchEulerDiscreteScheduler(**stored).config
    if strange := [
        name for name in UNSUPPORTED if config[name] not in (False, None, "exponential")
    ]:
        raise UserError(
            f"{file}: {strange[0]} {config[strange[0]]} is not supported; "
            "use a scheduler without it"
        )
    return config


def read_schedule(architecture: Architecture, pipeline: Path, image_tokens: int) -> Schedule:
    """Read the sigmas with which a pipeline itself samples images of that many tokens.

    UserError as `read_scheduler`.
    """
    return architecture.schedule(read_scheduler(pipeline), image_tokens)
