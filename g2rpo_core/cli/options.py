"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

OfRewards = Annotated[
    str | None, typer.Option(help="profile whose models and section `rewards` are used (default: the one in params.yaml)")
]
ModelsOfRewards = Annotated[
    Path | None,
    typer.Option(help="another folder made by the stage `models`; without --profile, rewards then have their default settings"),
]
