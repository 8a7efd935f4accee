"""`g2rpo models` and `g2rpo prompts`: what a profile needs before anything else, built or fetched."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from g2rpo_core.errors import UserError

Name = Annotated[str | None, typer.Option(help="a file of profiles/; the one that params.yaml names")]


def models(profile: Name = None) -> None:
    """Every model of a profile: built here for tiny, downloaded for the others, into the Hugging Face cache.

    What is complete is not loaded again. Example: g2rpo models --profile flux_hps
    """
    _run("models", profile)


def prompts(profile: Name = None) -> None:
    """A profile's training and test prompts, as prompts/<profile>/train.parquet and test.parquet.

    Example: g2rpo prompts --profile flux_hps
    """
    _run("prompts", profile)


def _run(stage: str, profile: str | None) -> None:
    """By DVC for the profile of params.yaml, so that `dvc repro` knows of it and what is up to date is left; else by the stage alone."""
    from g2rpo_core.config import load_profile, load_run, profile_path

    if not Path("stages", f"{stage}.py").exists():
        raise UserError(f"{stage}: run it in the project's checkout, where the folder `stages` is")
    by_dvc = profile in (None, load_run().profile)
    if profile:
        load_profile(profile_path(profile))
    words = ["dvc", "repro", stage] if by_dvc else [f"stages.{stage}", "--profile", str(profile)]
    sys.exit(subprocess.run([sys.executable, "-m", *words]).returncode)
