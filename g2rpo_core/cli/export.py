"""`g2rpo export`: a run's weights in a form that other programs read, with a model card, uploaded to a hub on request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import typer

from g2rpo_core.errors import UserError
from g2rpo_core.inference.runs import folder_of, kind_of


def export(
    run: Annotated[str, typer.Argument(help="a run such as g2rpo-1, or a run's folder")],
    form: Annotated[
        Literal["diffusers", "original", "lora", "kohya"],
        typer.Option(
            help="diffusers: a folder for from_pretrained; original: FLUX alone, one file with Black "
            "Forest Labs' names, for ComfyUI's diffusion_models; for a LoRA: lora (diffusers and ComfyUI) or, for FLUX, kohya (programs that read sd-scripts' names)"
        ),
    ],
    out: Annotated[Path, typer.Option(help="a new folder")],
    profile: Annotated[str | None, typer.Option(help="profile of the run (default: the one in params.yaml)")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="float32 as trained, or bfloat16 for half the size")
    ] = "float32",
    push: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="upload the folder to this hub repository (user/name); private if it is new"),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="with --push: make the repository public")] = False,
) -> None:
    """Write a run's trained weights in a form that other programs read, with a model card.

    Example: g2rpo export g2rpo-1 --form original --out my_model
    """
    draw_up(SimpleNamespace(**locals()))


def draw_up(args: SimpleNamespace) -> None:
    """Checks the options, then exports; UserError before anything is written if something does not fit."""
    from g2rpo_core.config import load_run
    from g2rpo_core.export.push import check_repo, push

    profile = args.profile or load_run().profile
    folder = folder_of(args.run, profile)
    if folder is None:
        raise UserError("export: the base needs no export: it is in models/<profile>/pipeline, or on the hub")
    trained = kind_of(folder)
    if (args.form in ("lora", "kohya")) != (trained == "lora"):
        raise UserError(
            f"export: {args.run} was trained as {'a LoRA: --form lora or kohya' if trained == 'lora' else 'whole weights: --form diffusers or original'}"
        )
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise UserError(f"export: --out {args.out} already exists; name a new folder")
    from g2rpo_core.export.write import check_form, write

    models = Path("models", profile)
    base = check_form(models, args.form)
    if args.public and not args.push:
        raise UserError("export: --public needs --push")
    if args.push:
        check_repo(args.push)

    from g2rpo_core.export.card import write_card

    args.out.mkdir(parents=True, exist_ok=True)
    file = write(models, folder / str(trained), args.form, args.out, args.dtype)
    write_card(args.out, profile, base, folder, args.form, file, args.push)
    print(file)
    if args.push:
        print(push(args.out, args.push, args.public))
