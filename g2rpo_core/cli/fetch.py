"""`g2rpo models` and `g2rpo prompts`: what a profile needs before anything else, built or fetched."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from g2rpo_core.errors import UserError

Name = Annotated[str | None, typer.Option(help="name of a file in profiles/ (default: the one in params.yaml)")]


def models(profile: Name = None) -> None:
    """Build the models of profile tiny, or download those of another profile into the Hugging Face cache.

    Complete models are not downloaded again. Example: g2rpo models --profile flux_hps
    """
    _run("models", profile)


def prompts(profile: Name = None) -> None:
    """Write a profile's training and test prompts to prompts/<profile>/train.parquet and test.parquet.

    Example: g2rpo prompts --profile flux_hps
    """
    _run("prompts", profile)


def _run(stage: str, profile: str | None) -> None:
    """Runs a stage directly, or through DVC for the profile of params.yaml, so that DVC knows it and skips what is up to date."""
    from g2rpo_core.config import load_profile, load_run, profile_path

    if not Path("stages", f"{stage}.py").exists():
        raise UserError(f"{stage}: run it in the project's checkout, where the folder `stages` is")
    by_dvc = profile in (None, load_run().profile)
    if profile:
        load_profile(profile_path(profile))
    words = ["dvc", "repro", stage] if by_dvc else [f"stages.{stage}", "--profile", str(profile)]
    sys.exit(subprocess.run([sys.executable, "-m", *words]).returncode)
