"""Commands that run modules of the checkout, such as `g2rpo models`, `rehearse` and `report`."""

import os
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from g2rpo_core.foundation.errors import UserError, require
from g2rpo_core.foundation.texts import echo

Name = Annotated[
    str | None, typer.Option(help="name of a file in profiles/ (default: the one in params.yaml)")
]
COMMANDS = {  # module, help, and an example of the arguments
    "rehearse": (
        "pipeline.rehearse",
        "Run the stages at true size on simulated GPUs.",
        "--profile flux_hps --gpus 16 --nodes 2 --memory 139",
    ),
    "launch": (
        "pipeline.launch",
        "Start this node's processes of a stage that several nodes share.",
        "train --method g2rpo --seed 1 --nodes 2 --endpoint HOST:29500",
    ),
    "todo": (
        "pipeline.todo",
        "Say which stages `dvc repro` would run, why, and for how long; nothing is run.",
        "",
    ),
}
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
DRAWN_BY = ("altair", "dvc", "scipy", "vl_convert")


def make_command(name: str, module: str) -> Callable[[typer.Context], None]:
    """Make a command that passes its arguments, including --help, to `python -m module`."""

    def run(context: typer.Context) -> None:
        _check_checkout(name, module)
        if "--help" in context.args:
            echo(f"Example: g2rpo {name} {COMMANDS[name][2]}", "")
            sys.stdout.flush()
        # In place of this process, so that signals reach the module
        os.execv(sys.executable, [sys.executable, "-m", module, *context.args])

    return run


def _check_checkout(name: str, module: str) -> None:
    if not Path(*module.split(".")).with_suffix(".py").exists():
        raise UserError(f"{name}: run it in the project's checkout, where the folder `stages` is")


def models(profile: Name = None) -> None:
    """Build the models of profile tiny, or download another profile's into the Hugging Face cache.

    Complete models are not downloaded again. Example: g2rpo models --profile flux_hps
    """
    _run("models", profile)


def prompts(profile: Name = None) -> None:
    """Write a profile's train.parquet and test.parquet into prompts/<profile>.

    Example: g2rpo prompts --profile flux_hps
    """
    _run("prompts", profile)


def _run(stage: str, profile: str | None) -> None:
    """Run a stage directly, or, for the profile of params.yaml, through DVC.

    DVC then knows it, and skips what is up to date.
    """
    from g2rpo_core.config import load_profile, load_run, profile_path

    _check_checkout(stage, f"stages.{stage}")
    by_dvc = profile in (None, load_run().profile)
    if profile:
        load_profile(profile_path(profile))
    if by_dvc:
        require(f"g2rpo {stage}", "flows", "dvc")
    words = ["dvc", "repro", stage] if by_dvc else [f"stages.{stage}", "--profile", str(profile)]
    sys.exit(subprocess.run([sys.executable, "-m", *words]).returncode)


def report(
    study: Annotated[
        str | None,
        typer.Option(
            help="a folder in studies/, such as compare (default: the runs of params.yaml)"
        ),
    ] = None,
    make: Annotated[
        bool, typer.Option("--make", help="update it first, from the existing runs and scores")
    ] = False,
    open: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="compare two commits, studies or profiles, as Markdown; "
            "`now` means the files in this folder",
        ),
    ] = None,
) -> None:
    """Print where the comparison report of the runs or of a study is; make it if there is none.

    A study that was not run here has its page made from its committed table.

    Example: g2rpo report --study compare --open

    Example: g2rpo report --compare HEAD~1 now
    """
    # Compare two results
    if compare:
        if not Path("pipeline", "compare.py").exists():
            raise UserError("report: run it in the project's checkout")
        require("g2rpo report --compare", "report", *DRAWN_BY)
        sys.exit(subprocess.run([sys.executable, "-m", "pipeline.compare", *compare]).returncode)
    # Find the report, and make it if there is none
    home = Path("studies", study) if study else Path(".")
    if not (home / "params.yaml").exists():
        known = ", ".join(sorted(file.parts[1] for file in Path("studies").glob("*/params.yaml")))
        raise UserError(
            f"report: --study {study}: there are {known or 'none here'}"
            if study
            else "report: run it in the project's checkout"
        )
    file = home / "reports" / "report.html"
    if study and not (home / "evaluations").exists():
        _render_study(study)
    elif make or not file.exists():
        require("g2rpo report", "report", *DRAWN_BY)
        command = [sys.executable, "-m", "dvc", "repro", "--single-item", "report"]
        if subprocess.run(command, cwd=home, stdout=sys.stderr).returncode:
            raise UserError(
                f"report: {file} could not be made (see the lines above); "
                f"`cd {home} && dvc repro` makes everything"
            )
    # Show it
    echo(file.resolve())
    if open and not webbrowser.open(file.resolve().as_uri()):
        raise UserError(f"report: no browser could be started here; open {file.resolve()} yourself")


def _render_study(name: str) -> None:
    """Make a study's page from its table; if the stage fails, exit with its status."""
    from g2rpo_core.config import load_study  # imports torch, which would slow down --help

    words = ["--profile", load_study(name).profile, "--study", name]
    command = [sys.executable, "-m", "stages.report", *words]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(status)
