"""Render the page's contents as HTML; the templates escape everything that users have typed."""

import base64
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.demo.answer import DrawnImage, ImageRequest, from_link, kept_links, link

OPEN_TO_ALL = "Anyone who can reach this address can use the page: there is no password."
# the tables of images in reporting/templates/report.html.j2
PAIRS = re.compile(r'<div class="scroll"><table class="pictures.*?</table></div>', re.DOTALL)

HIDDEN = {"api_visibility": "private"}  # of an event
ALONE = {**HIDDEN, "concurrency_limit": 1, "concurrency_id": "draw"}  # one request at a time

environment = Environment(
    loader=PackageLoader("g2rpo_core.inference.demo"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)
environment.filters["b64"] = lambda data: base64.b64encode(data).decode()


def head(profile: str, open_to_all: bool) -> str:
    return environment.get_template("head.html.j2").render(
        profile=profile, warning=OPEN_TO_ALL if open_to_all else ""
    )


def message(text: str) -> str:
    return environment.from_string('<p class="g2-error" role="alert">{{ text }}</p>').render(
        text=text
    )


def failure(error: Exception) -> str:
    """Render an error in one sentence; one that no user can cause also goes to the console."""
    if isinstance(error, UserError):
        return message(str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return message(
            "the device has too little memory for so many models: choose fewer runs or rewards, "
            "and restart the demo"
        )
    traceback.print_exception(error)
    return message(
        f"this failed because of a bug in the program ({type(error).__name__}); "
        "see the console of `g2rpo demo`"
    )


def images(
    asked: ImageRequest,
    drawn: Sequence[DrawnImage],
    labels: Mapping[str, str],
    size: EvaluationSettings,
    note: str | None,
) -> str:
    """Render every image with its run and scores, and the differences from the base's scores."""
    shown = {"asked": asked, "drawn": drawn, "labels": labels, "note": note, "link": link(asked)}
    return environment.get_template("pictures.html.j2").render(
        shown, width=size.width, height=size.height, pixelated=size.height < 128
    )


def history(saved: object, usual: Mapping[str, object]) -> str:
    """Render the links to earlier images, without those that do not fit: browsers keep them."""
    past = []
    for text in kept_links(saved):
        try:
            past.append((asked := from_link(text, usual), link(asked)))
        except UserError:
            continue
    return environment.get_template("history.html.j2").render(past=past)


def reports() -> dict[str, Path]:
    """Find the reports of this checkout by name: that of params.yaml, and those of the studies."""
    files = {"the runs of params.yaml": Path("reports", "report.html")}
    files |= {
        f"study {path.parts[1]}": path
        for path in sorted(Path("studies").glob("*/reports/report.html"))
    }
    return {name: path for name, path in files.items() if path.exists()}


def pairs(report: Path | None) -> str:
    """Cut the images out of a report: each prompt with every method."""
    if report is None or not report.exists():
        return message("there is no report here yet: `dvc repro` makes it")
    return "\n".join(PAIRS.findall(report.read_text(encoding="utf-8"))) or message(
        f"{report} has no images"
    )
