"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

OfRewards = Annotated[
    str | None, typer.Option(help="whose models and section `rewards` are used; the one that params.yaml names")
]
ModelsOfRewards = Annotated[
    Path | None,
    typer.Option(help="another folder of the stage `models`; without --profile rewards then have their default settings"),
]
