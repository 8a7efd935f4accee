"""Write a run's weights in forms that other programs read, with a model card, and upload them."""

import random
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from httpx2 import HTTPError
from huggingface_hub import HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id
from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors.torch import save_file

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.architectures.architecture import Architecture, Config
from g2rpo_core.architectures.table import read_architecture
from g2rpo_core.config import (
    Profile,
    ResolvedRun,
    evaluated_together,
    load_profile,
    load_study,
    profile_path,
)
from g2rpo_core.config.drawn import bases_for
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import SCORES, image_folder, reported
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.errors import TransientError, UserError, attempt
from g2rpo_core.foundation.files import reading, write_json
from g2rpo_core.foundation.runs import BASE, evaluation_folder
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import echo, markdown
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.inference.runs import find_place
from g2rpo_core.models.loading import load_transformer
from g2rpo_core.rewards.registry import labels
from g2rpo_core.sampling.seeding import seed_of
from g2rpo_core.weights.adapter import (
    LORA_FILE,
    PEFT_CONFIG,
    PEFT_FILE,
    in_diffusers_names,
    in_kohyas_names,
    in_peft_names,
    read_adapter,
)
from g2rpo_core.weights.stored import shapes_of

TEMPLATES = Environment(
    loader=PackageLoader("g2rpo_core.inference"),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
TEMPLATES.filters |= {"literal": markdown, "python": repr}
SHOWN = 4  # prompts with images
Form = Literal["diffusers", "original", "lora", "peft", "kohya"]


def check_form(models: Path, form: Form) -> Architecture:
    """Return the base model of the stage `models`; UserError if its weights have no such form."""
    base = read_architecture(ModelStore(models).folder("pipeline"))
    if form not in base.forms:
        raise UserError(f"export: {base.label} has no form {form}, only {', '.join(base.forms)}")
    return base


def write(
    models: Path,
    trained: Path,
    name: str,
    form: Form,
    out: Path,
    dtype: Literal["float32", "bfloat16"],
) -> Path:
    """Write the weights to `out` and return the new file or folder.

    models: the folder of the stage `models`; trained: as `weights_in` returns it; name: of a file
    that has no usual one. UserError if the weights are not all of this base model's.
    """
    kind = getattr(torch, dtype)
    architecture = check_form(models, form)
    pipeline = ModelStore(models).folder("pipeline")
    home = next(
        (place for place in (trained, trained.parent) if (place / "config.json").exists()),
        pipeline / "transformer",
    )
    with reading(home / "config.json"):
        config = architecture.transformer.load_config(home)
    # The whole transformer, as diffusers saves it, or one file with other names
    if form in ("diffusers", "original"):
        transformer = load_transformer(
            architecture, trained, torch.device("cpu"), kind, trained=False, config=home
        )
        if form == "diffusers":
            transformer.save_pretrained(out / "transformer")
            return out / "transformer"
        file = out / f"{name}.safetensors"
        weights = architecture.original(transformer.state_dict(), config)
    # Or a LoRA, alone
    else:
        file, weights = _adapter_file(architecture, config, trained, name, form, out)
    # In the asked dtype; an alpha stays as it is
    cast = {
        key: (value if key.endswith(".alpha") else value.to(kind)).contiguous()
        for key, value in weights.items()
    }
    save_file(cast, file, metadata={"format": "pt"})
    return file


def _adapter_file(
    architecture: Architecture, config: Config, trained: Path, name: str, form: Form, out: Path
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a LoRA's file and tensors in a form; write PEFT's configuration beside it."""
    shapes = shapes_of(architecture, config)
    adapter = read_adapter(architecture, config, shapes, trained)
    if form == "lora":
        return out / LORA_FILE, in_diffusers_names(adapter)
    if form == "kohya":
        tensors = in_kohyas_names(architecture, config, shapes, adapter)
        if left := {
            key.partition(".")[0] for key in tensors if key.startswith("lora_unet_final_layer")
        }:
            echo(
                f"note: sd-scripts load no {' and '.join(sorted(left))}; ComfyUI does",
                file=sys.stderr,
            )
        return out / f"{name}.safetensors", tensors
    tensors, about = in_peft_names(adapter, shapes)
    write_json(out / PEFT_CONFIG, about)
    return out / PEFT_FILE, tensors


def write_card(
    out: Path,
    profile: str,
    architecture: Architecture,
    run: Path,
    form: Form,
    file: Path,
    repo: str | None,
) -> Path:
    """Write README.md and the images that it shows to `out`.

    Weights that were not evaluated here get neither table nor images, and those of no run of this
    checkout no settings either; the card says so. repo: where they will be uploaded, for the code
    snippet. UserError if the run is one of another profile.
    """
    # The run, its settings and its base model
    place = find_place(run)
    if place and place.profile != profile:
        own = place.profile
        raise UserError(f"export: {run} is a run of profile {own}: give --profile {own}")
    study = place.study if place else None
    settings = load_profile(profile_path(profile), load_study(study) if study else None)
    method = run.name.rsplit("-", 1)[0]
    trained = settings.run(method) if place and method in settings.methods else None
    evaluation = place.evaluation if place and place.was_evaluated() else None
    beside = base_beside(settings, profile, method, study) if trained and evaluation else None
    repos = getattr(settings.models, "repos", {})
    base = repos["pipeline"].repo if repos else None
    terms = licence(architecture, base) if repos else {}
    # Text, with scores and images where both were evaluated
    shown: dict[str, Any] = {
        "run": run.name,
        "profile": profile,
        "pipeline_class": architecture.pipeline.__name__,
        "transformer_class": architecture.transformer.__name__,
        "label": architecture.label,
        "study": study,
        "built": not repos,
        "base": base,
        "revision": repos["pipeline"].revision if repos else None,
        "licence": terms,
        "form": form,
        "file": file.name,
        "repo": repo or "path/to/this/folder",
        "trained": trained,
        "method_label": LABELS[settings.methods[method].method or method] if trained else None,
        "evaluation": settings.evaluation,
        "labels": labels(settings.rewards),
        "scores": [],
        "images": [],
        "evaluated": evaluation is not None,
        **_usage(settings, profile, architecture, trained),
    }
    if evaluation and beside:
        shown["scores"] = read_means(evaluation, beside, settings.evaluation)
        shown["images"] = copy_images(out, settings, profile, evaluation, beside)
    text = TEMPLATES.get_template("card.md.j2").render(shown)
    data = _metadata(architecture, base, form in ("lora", "peft", "kohya"), terms)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(out / "README.md")
    return out / "README.md"


def _usage(
    settings: Profile, profile: str, architecture: Architecture, trained: ResolvedRun | None
) -> dict[str, Any]:
    """Return how diffusers draws as the evaluation does: the arguments of a call, and the dtype."""
    file = Path("prompts", profile, "test.parquet")
    drawn = (trained.sampling if trained else settings.sampling).drawn
    call = {
        "prompt": load_prompts(file)[0].text if file.exists() else "a red circle",
        "height": settings.evaluation.height,
        "width": settings.evaluation.width,
        "num_inference_steps": settings.evaluation.steps[0],
        **architecture.pipeline_guidance(drawn["guidance"]),
        "max_sequence_length": settings.embed.max_sequence_length,
    }
    return {"call": call, "sampling_dtype": drawn["dtype"]}


def _metadata(
    architecture: Architecture, base: str | None, lora: bool, terms: dict[str, Any]
) -> ModelCardData:
    """Return the card's metadata for the hub; terms: of the licence."""
    return ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if lora else "finetune") if base else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["g2rpo", architecture.tag, "reinforcement-learning", "grpo"] + ["lora"] * lora,
        **terms,
    )


def base_beside(settings: Profile, profile: str, method: str, study: str | None) -> Path | None:
    """Return the folder, among all evaluations, of the base drawn as a method's images are.

    None if it is not evaluated with them.
    """
    methods, published = evaluated_together(profile, load_study(study) if study else None)
    together = (*(settings.methods if methods is None else methods), *published)
    bases = bases_for(settings.sampling, map(settings.sampling_of, together))
    alike = [name for name, how in bases.items() if how.drawn == settings.sampling_of(method).drawn]
    return evaluation_folder(alike[0], BASE[1]) if alike else None


def licence(architecture: Architecture, base: str | None) -> dict[str, Any]:
    """Return the card's licence metadata; base: the base model's repository, None for a folder."""
    for start, licence in architecture.licences.items():
        if base and base.startswith(start):
            return dict(licence)
    link = {"license_link": f"https://huggingface.co/{base}"} if base else {}
    return {"license": "other", "license_name": "that-of-the-base-model"} | link


def read_means(
    evaluated: Path, beside: Path, settings: EvaluationSettings
) -> list[tuple[str, float, float]]:
    """Return every reward with the base's and the run's means over the test prompts.

    Empty if the base was not evaluated alike.
    """
    files = [evaluated.parent / beside / "results.parquet", evaluated / "results.parquet"]
    if not files[0].exists():
        return []
    base, run = (
        reported(read_table(file, SCORES), settings).groupby("reward").score.mean()
        for file in files
    )
    return [
        (reward, float(base[reward]), float(run[reward]))
        for reward in settings.rewards
        if reward in base and reward in run
    ]


def copy_images(
    out: Path, settings: Profile, profile: str, evaluated: Path, base: Path
) -> list[dict[str, str]]:
    """Copy the images of the report's first prompts.

    evaluated, base: the folders of the run's evaluation and, beside it, the base's. Return each
    prompt with the files of base and run, relative to `out`.
    """
    evaluation, prompts_file = settings.evaluation, Path("prompts", profile, "test.parquet")
    folders = {
        "base": evaluated.parent / base / image_folder("final", evaluation.steps[0]),
        "run": evaluated / image_folder(evaluation.checkpoints[0], evaluation.steps[0]),
    }
    if not prompts_file.exists():
        return []
    # The same draw as the report's
    prompts = {prompt.id: prompt.text for prompt in load_prompts(prompts_file)}
    drawn = random.Random(seed_of("report")).sample(sorted(prompts), min(SHOWN, len(prompts)))
    found = [
        key for key in drawn if all((each / f"{key}.png").exists() for each in folders.values())
    ]
    for key, (name, folder) in product(found, folders.items()):
        (out / "pictures").mkdir(exist_ok=True)
        shutil.copyfile(folder / f"{key}.png", out / "pictures" / f"{key}-{name}.png")
    files = lambda key: {name: f"pictures/{key}-{name}.png" for name in folders}
    return [{"prompt": prompts[key], **files(key)} for key in found]


def check_repo(repo: str) -> None:
    """Check for a valid name and a login at the hub before any work; UserError otherwise."""
    if attempt(lambda: validate_repo_id(repo), HFValidationError)[1]:
        raise UserError(f"--push {repo}: not a repository name; give it as `user/name`")
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push: HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError(
            "--push: you are not logged in to the hub: run `hf auth login`, "
            "or set HF_TOKEN to a token with write access"
        )


def push(folder: Path, repo: str, public: bool) -> str:
    """Upload the folder and return the commit's address.

    The repository is created if needed, private unless `public`. The hub is that of HF_ENDPOINT.
    UserError if it refuses, or if the repository is there already and not as `public` says;
    TransientError if it cannot be reached.
    """
    api = HfApi(token=get_token())  # also under HF_HUB_DISABLE_IMPLICIT_TOKEN: an upload has to
    try:
        created = api.create_repo(repo, private=not public, exist_ok=True)
        private = api.model_info(created.repo_id).private
        if private == public:
            seen, option = (
                ("nobody else", "omit --public") if public else ("everyone", "give --public")
            )
            raise UserError(
                f"--push {repo}: it already exists and {seen} can see it: {option}, "
                "or choose another name"
            )
        done = api.upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message="Upload by g2rpo export"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status == 429:
            raise TransientError(
                f"--push {repo}: {api.endpoint} answers {status}: run it again later"
            ) from None
        why = ": the token needs write access to it" if status in (401, 403) else ""
        raise UserError(f"--push {repo}: {api.endpoint} refuses ({status}){why}") from None
    # Its text may hold the request, and so the token; RuntimeError is Xet storage's
    except (HTTPError, OSError, RuntimeError) as error:
        raise TransientError(
            f"--push {repo}: {api.endpoint} cannot be reached ({type(error).__name__}): "
            "run it again"
        ) from None
    return done.commit_url
