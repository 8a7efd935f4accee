"""Write a run's weights for other programs, for `g2rpo export`."""

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from g2rpo_core.config import load_profile, load_run, profile_path
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import writing
from g2rpo_core.foundation.permissions import share_weights
from g2rpo_core.foundation.texts import echo
from g2rpo_core.inference.export import check_form, check_repo, write, write_card
from g2rpo_core.inference.export import push as upload
from g2rpo_core.inference.runs import find_weights
from g2rpo_core.weights.stored import weights_in


def export(
    run: str,
    form: Literal["diffusers", "original", "lora", "peft", "kohya"],
    out: Path,
    profile: str | None,
    dtype: Literal["float32", "bfloat16"],
    push: str | None,
    public: bool,
) -> None:
    """Check the options, then export; UserError before anything is written."""
    # Check the options
    profile = profile or load_run().profile
    folder = find_weights(run, profile)
    if folder is None:
        raise UserError(
            "export: the base needs no export: it is in models/<profile>/pipeline, or on the hub"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"export: --out {out} already exists; name a new folder")

    trained, lora = weights_in(folder)
    if (form in ("lora", "peft", "kohya")) != lora:
        forms = (
            "a LoRA: --form lora, peft or kohya"
            if lora
            else "whole weights: --form diffusers or original"
        )
        raise UserError(f"export: {run} was trained as {forms}")
    models = Path("models", profile)
    base = check_form(models, form)
    if public and not push:
        raise UserError("export: --public needs --push")
    if push:
        check_repo(push)

    # Write weights and card aside, then give them their name, and upload them
    aside = out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}.tmp")
    try:
        with writing(out):
            aside.mkdir(parents=True)
            file = write(
                models, trained, folder.name.removesuffix(".safetensors"), form, aside, dtype
            )
            write_card(aside, profile, base, folder, form, file, push)
            share_weights(aside)
            aside.replace(out.resolve())
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    echo(out / file.relative_to(aside))
    if form == "original" and load_profile(profile_path(profile)).models.source != "hub":
        echo(
            "note: diffusers' from_single_file takes this form for FLUX.1 at its true size, "
            "so it cannot read it of a small model",
            file=sys.stderr,
        )
    if push:
        echo(upload(out, push, public))
