"""`g2rpo report`: prints where the report is, makes it if there is none, and opens it in the browser on request."""

import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from g2rpo_core.errors import UserError


def report(
    study: Annotated[
        str | None, typer.Option(help="a folder in studies/, such as compare (default: the runs of params.yaml)")
    ] = None,
    make: Annotated[bool, typer.Option("--make", help="update it first, from the existing runs and scores")] = False,
    open: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="compare two commits, studies or profiles, as Markdown; `now` means the files in this folder"
        ),
    ] = None,
) -> None:
    """Print where the comparison report of the runs, or of a study, is; make it first if there is none.

    Example: g2rpo report --study compare --open

    Example: g2rpo report --compare HEAD~1 now
    """
    if compare:
        if not Path("stages", "compare.py").exists():
            raise UserError("report: run it in the project's checkout")
        sys.exit(subprocess.run([sys.executable, "-m", "stages.compare", *compare]).returncode)
    home = Path("studies", study) if study else Path(".")
    if not (home / "dvc.yaml").exists():
        known = ", ".join(sorted(path.parent.name for path in Path("studies").glob("*/dvc.yaml")))
        raise UserError(
            f"report: --study {study}: there are {known or 'none here'}" if study else "report: run it in the project's checkout"
        )
    file = home / "reports" / "report.html"
    if make or not file.exists():
        command = [sys.executable, "-m", "dvc", "repro", "--single-item", "report"]
        if subprocess.run(command, cwd=home, stdout=sys.stderr).returncode:
            raise UserError(f"report: {file} could not be made (see the lines above); `cd {home} && dvc repro` makes everything")
    print(file.resolve())
    if open and not webbrowser.open(file.resolve().as_uri()):
        raise UserError(f"report: no browser could be started here; open {file.resolve()} yourself")
