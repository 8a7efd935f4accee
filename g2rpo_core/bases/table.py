"""All base models, and which of them a pipeline's folder or a repository holds."""

from pathlib import Path

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from g2rpo_core.bases.base import Base, Published
from g2rpo_core.bases.flux import Flux
from g2rpo_core.bases.schedule import Schedule
from g2rpo_core.bases.sd3 import StableDiffusion3
from g2rpo_core.common.model_store import AGAIN
from g2rpo_core.errors import UserError
from g2rpo_core.files import complaint, read_json, reading, whole

BASES: dict[str, Base] = {base.pipeline.__name__: base for base in (Flux(), StableDiffusion3())}


def base_of(pipeline: Path) -> Base:
    """The base model in a diffusers pipeline's folder, by the class in its model_index.json; UserError for any other class."""
    file = pipeline / "model_index.json"
    name = read_json(whole(file, AGAIN), AGAIN, dict).get("_class_name")
    if name not in BASES:
        raise UserError(complaint(file, f"{name} is no base model that is known here, only {', '.join(BASES)}", AGAIN))
    return BASES[name]


def published_shape(repo: str) -> tuple[Base, Published] | None:
    """The base model and the shape of a published repository; None for one that is not known here."""
    return next(((base, base.published[repo]) for base in BASES.values() if repo in base.published), None)


def known_repos() -> list[str]:
    """The repositories whose shape is known."""
    return [repo for base in BASES.values() for repo in base.published]


def text_encoders(pipeline: Path, **how: object) -> DiffusionPipeline:
    """The pipeline without transformer and VAE; how: further arguments of `from_pretrained`. UserError if a part is missing."""
    base = base_of(pipeline)
    index = read_json(pipeline / "model_index.json", AGAIN, dict)
    if lacking := [part for part in (*base.text_encoders, *base.tokenizers) if None in index.get(part, [None])]:
        reason = f"has no {', '.join(lacking)}: {base.label} encodes its prompts with all of {', '.join(base.text_encoders)}"
        raise UserError(complaint(pipeline, reason, AGAIN))
    with reading(pipeline, AGAIN):
        return base.pipeline.from_pretrained(pipeline, transformer=None, vae=None, **how)


def published_schedule(base: Base, pipeline: Path, image_tokens: int) -> Schedule:
    """The sigmas with which the pipeline in a folder itself samples images of that many tokens.

    UserError for a scheduler that is not supported.
    """
    whole(file := pipeline / "scheduler" / "scheduler_config.json", AGAIN)
    with reading(file, AGAIN):
        config = FlowMatchEulerDiscreteScheduler(**FlowMatchEulerDiscreteScheduler.load_config(pipeline / "scheduler")).config
    try:
        return base.schedule(config, image_tokens)
    except ValueError as error:
        raise UserError(f"{pipeline / 'scheduler'}: {error}") from None
