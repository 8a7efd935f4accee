"""`g2rpo export`: a run's weights as other programs read them, with a card that says what they are."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from g2rpo_core.config import load_profile, load_run, method_of, profile_path, training_of
from g2rpo_core.errors import UserError
from g2rpo_core.files import read_json, reading, remade_by
from g2rpo_core.settings import checked_name

Form = Literal["diffusers", "original", "lora", "kohya"]


def export(
    run: Annotated[str, typer.Argument(help="as g2rpo-1")],
    form: Annotated[
        Form,
        typer.Option(
            help="diffusers: a folder for from_pretrained; original: one file in Black Forest Labs' names, as ComfyUI's diffusion_models; "
            "of a LoRA: lora, for diffusers and ComfyUI, or kohya, for what reads sd-scripts' names"
        ),
    ],
    out: Annotated[Path, typer.Option(help="a new folder")],
    profile: Annotated[str | None, typer.Option(help="the one that params.yaml names")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="float32 is what was trained, bfloat16 half of it")
    ] = "float32",
) -> None:
    """A run's trained weights in the names that other programs read, and a model card.

    Example: g2rpo export g2rpo-1 --form original --out my_model
    """
    profile = profile or load_run().profile
    folder = Path("runs", checked_name(profile, "--profile"), checked_name(run, "export: the run"))
    trained = "lora" if (folder / "lora").exists() else "transformer"
    if not (folder / trained).exists():
        there = ", ".join(sorted(path.name for path in folder.parent.glob("*") if path.is_dir())) or "none"
        raise UserError(f"export: {folder} has no trained weights; of {profile} there are {there}")
    if (form in ("lora", "kohya")) != (trained == "lora"):
        raise UserError(
            f"export: {run} was trained as {'a LoRA: --form lora or kohya' if trained == 'lora' else 'whole weights: --form diffusers or original'}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"export: --out {out} is there already; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    file = write(profile, folder / trained, form, out, dtype)
    (out / "README.md").write_text(card(profile, run, form, file))
    print(file)


def write(profile: str, folder: Path, form: Form, out: Path, dtype: str) -> Path:
    """The weights in `out`: the file or folder."""
    import torch
    from diffusers import FluxTransformer2DModel
    from safetensors.torch import load_file, save_file

    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.export import layouts
    from g2rpo_core.models.flux import LORA_FILE

    kind = getattr(torch, dtype)
    again = remade_by(f"train@{folder.parent.name}")
    if form == "diffusers":
        with reading(folder, again):
            transformer = FluxTransformer2DModel.from_pretrained(folder, dtype=kind)
        transformer.save_pretrained(out / "transformer")
        return out / "transformer"
    base = folder if form == "original" else ModelStore(Path("models", profile)).folder("pipeline") / "transformer"
    with reading(base / "config.json", again):
        config = FluxTransformer2DModel.load_config(base)
        depth = (config["num_layers"], config["num_single_layers"])
    if form == "original":
        with reading(folder, again):
            state = FluxTransformer2DModel.from_pretrained(folder).state_dict()
        weights = layouts.original(state, *depth)
    else:
        from safetensors import safe_open

        with reading(folder / LORA_FILE, again), safe_open(folder / LORA_FILE, "pt") as opened:
            lora = load_file(folder / LORA_FILE)
            alpha = float(json.loads(opened.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"])
        if form == "lora":
            weights = layouts.with_alpha(lora, alpha)
        else:
            with torch.device("meta"):
                shapes = {name: value.shape for name, value in FluxTransformer2DModel.from_config(config).state_dict().items()}
            weights = layouts.kohya(lora, shapes, alpha, *depth)
    cast = {key: value if key.endswith(".alpha") else value.to(kind) for key, value in weights.items()}
    file = out / (LORA_FILE if form == "lora" else f"{folder.parent.name}.safetensors")
    save_file({key: value.contiguous() for key, value in cast.items()}, file, metadata={"format": "pt"})
    return file


def card(profile: str, run: str, form: Form, file: Path) -> str:
    """The model card: what it was made from and how, and its scores beside the base's."""
    settings = load_profile(profile_path(profile))
    method = run.rsplit("-", 1)[0]
    training = training_of(settings.training, settings.methods, method)
    repos = getattr(settings.models, "repos", {})
    hub = bool(repos)
    base = repos["pipeline"].repo if hub else "small models of profile tiny"
    lines = [
        "---",
        *([f"base_model: {base}"] if hub else []),
        "library_name: diffusers",
        "tags: [g2rpo, text-to-image, flux, reinforcement-learning]",
    ]
    lines += [
        "---",
        f"# {run}",
        "",
        f"{base}, trained by {method} ({method_of(settings.methods, method).branching} branching) with",
    ]
    lines += [f"[g2rpo](https://arxiv.org/abs/2510.01982) on {', '.join(training.rewards)}: {training.iterations} iterations,"]
    lines += [
        f"learning rate {training.learning_rate:g}{', LoRA of rank ' + str(training.lora.rank) if training.lora else ''}. Form: `{form}`, `{file.name}`."
    ]
    lines += [
        "",
        "The base model's licence holds for it, and for what is made with it." if hub else "Nothing of it is a published model.",
    ]
    scores = {name: Path("reports", "metrics", f"{name}.json") for name in ("base-0", run)}
    stages = ("evaluate_base", f"evaluate@{run}")
    if all(path.exists() for path in scores.values()):
        read = {name: read_json(path, remade_by(stage), dict) for (name, path), stage in zip(scores.items(), stages)}
        lines += ["", "| reward, mean over the test prompts | base | trained |", "|---|---|---|"]
        lines += [
            f"| {reward} | {value:.4f} | {read[run][reward]:.4f} |"
            for reward, value in read["base-0"].items()
            if reward in read[run]
        ]
    return "\n".join(lines) + "\n"
