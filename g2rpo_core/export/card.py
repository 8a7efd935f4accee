"""The model card of an exported run, in the hub's format: base model, training, scores beside the base's, and pictures."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from g2rpo_core.bases.base import Base
from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.common.seeding import seed_of
from g2rpo_core.config import Profile, load_profile, load_study, method_of, profile_path, sampling_of, training_of
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.export.write import Form
from g2rpo_core.files import read_json
from g2rpo_core.rewards.registry import labels

TEMPLATES = Environment(
    loader=PackageLoader("g2rpo_core.export"),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
PICTURES = 4  # prompts


@dataclass(frozen=True)
class Results:
    """Where the settings, reports and evaluations of a run are; `study`: the study that the run belongs to, if any."""

    study: str | None
    reports: Path
    evaluations: Path


def results_of(run: Path, profile: str) -> Results:
    """The results of a run's folder: `runs/<profile>/<run>`, or `studies/<study>/runs/<run>`."""
    if run.parts[:1] == ("studies",) and len(run.parts) == 4:
        home = Path("studies", run.parts[1])
        return Results(run.parts[1], home / "reports", home / "evaluations")
    return Results(None, Path("reports"), Path("evaluations", profile))


def write_card(out: Path, profile: str, architecture: Base, run: Path, form: Form, file: Path, repo: str | None) -> Path:
    """Writes README.md and the pictures that it shows to `out`; repo: where they will be uploaded, for the code snippet.

    A run that was not evaluated gets neither table nor pictures, and the card says so.
    """
    where = results_of(run, profile)
    settings = load_profile(profile_path(profile), load_study(where.study) if where.study else None)
    method = run.name.rsplit("-", 1)[0]
    known = method in settings.methods
    repos = getattr(settings.models, "repos", {})
    base = repos["pipeline"].repo if repos else None
    lora = form in ("lora", "kohya")
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if lora else "finetune") if base else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=[
            "g2rpo",
            architecture.tag,
            "reinforcement-learning",
            "grpo",
            *(["lora"] if lora else []),
        ],
        **licence(architecture, base),
    )
    shown = {
        "run": run.name,
        "profile": profile,
        "pipeline_class": architecture.pipeline.__name__,
        "transformer_class": architecture.transformer.__name__,
        "label": architecture.label,
        "study": where.study,
        "base": base,
        "revision": repos["pipeline"].revision if repos else None,
        "licence": licence(architecture, base),
        "form": form,
        "file": file.name,
        "repo": repo or "path/to/this/folder",
        "method": method_of(settings.methods, method).model_dump() if known else None,
        "method_name": settings.methods[method].method or method if known else None,
        "training": training_of(settings.training, settings.methods, method) if known else settings.training,
        "sampling": sampling_of(settings.sampling, settings.methods, method) if known else settings.sampling,
        "evaluation": settings.evaluation,
        "labels": labels(settings.rewards),
        "scores": scores_of(where.reports, run.name),
        "pictures": copy_pictures(out, settings, profile, where.evaluations, run.name),
    }
    text = TEMPLATES.get_template("card.md.j2").render(shown)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(out / "README.md")
    return out / "README.md"


def licence(architecture: Base, base: str | None) -> dict[str, Any]:
    """The card's licence metadata for weights made from a base model; empty for the project's tiny models."""
    if base is None:
        return {}
    known = next((found for start, found in architecture.licences.items() if base.startswith(start)), None)
    return dict(
        known
        or {
            "license": "other",
            "license_name": "that-of-the-base-model",
            "license_link": f"https://huggingface.co/{base}",
        }
    )


def scores_of(reports: Path, run: str) -> list[tuple[str, float, float]]:
    """Every reward with the base's and the run's means over the test prompts; empty if one of the two was not evaluated."""
    files = [reports / "metrics" / f"{name}.json" for name in (run_name(*BASE), run)]
    if not all(file.exists() for file in files):
        return []
    base, trained = (read_json(file, "`dvc repro evaluate` makes it again", dict) for file in files)
    return [(reward, value, trained[reward]) for reward, value in base.items() if reward in trained]


def copy_pictures(out: Path, settings: Profile, profile: str, evaluations: Path, run: str) -> list[dict[str, str]]:
    """Copies the pictures of the report's first prompts.

    Returns each prompt with the files of base and run, relative to `out`.
    """
    evaluation, prompts_file = settings.evaluation, Path("prompts", profile, "test.parquet")
    checkpoints = {run_name(*BASE): "final", run: evaluation.checkpoints[0]}
    folders = {
        name: evaluations / name / image_folder(checkpoint, evaluation.steps[0]) for name, checkpoint in checkpoints.items()
    }
    if not prompts_file.exists() or not all(folder.is_dir() for folder in folders.values()):
        return []
    prompts = {prompt.id: prompt.text for prompt in load_prompts(prompts_file)}
    drawn = random.Random(seed_of("report")).sample(sorted(prompts), min(PICTURES, len(prompts)))
    (out / "pictures").mkdir()
    lines = []
    for key in drawn:
        line = {"prompt": prompts[key]}
        for name, folder in folders.items():
            if not (source := folder / f"{key}.png").exists():
                break
            line["base" if name == run_name(*BASE) else "run"] = f"pictures/{key}-{name}.png"
            shutil.copyfile(source, out / "pictures" / f"{key}-{name}.png")
        else:
            lines.append(line)
    return lines
