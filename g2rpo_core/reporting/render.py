"""Renders the report as a page and as Markdown, from one context and the Jinja templates in `templates`, with its images embedded.

Small images are embedded as they are, large ones as thumbnails that link to the lossless file.
"""

import base64
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from PIL import Image

from g2rpo_core.foundation.files import reading, whole
from g2rpo_core.foundation.texts import markdown, steering, unsteered
from g2rpo_core.reporting.charts import library, svg
from g2rpo_core.reporting.tables import tone

CHARTS = ("forest", "curves")
LARGE = 512  # pixels; a longer side than this becomes a thumbnail
THUMBNAIL = 320
QUALITY = 80  # of WebP


def render(context: dict) -> dict[str, str]:
    """Return the report's files by name, from a context of `build_context`: report.html, report.md, and each chart as an image."""
    environment = Environment(
        loader=PackageLoader("g2rpo_core.reporting"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_without_steering,
    )
    environment.filters["tone"] = tone
    environment.filters["script"] = in_script
    environment.filters["literal"] = markdown
    environment.globals["library"] = library
    images = {name: svg(context[name]) for name in CHARTS}
    shown = context | {"images": {name: Markup(image) for name, image in images.items()}}
    texts = {name: environment.get_template(f"{name}.j2").render(shown) for name in ("report.html", "report.md")}
    return texts | {f"{name}.svg": image for name, image in images.items()}


def _without_steering(value: object) -> object:
    """Replace characters that could steer a terminal or reorder text, in all that is not our own markup."""
    return unsteered(value) if isinstance(value, str) and not isinstance(value, Markup) and steering(value) else value


def in_script(value: object) -> Markup:
    """Return JSON that cannot end the script element, whatever text it holds."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))


def small(image: str) -> str:
    """Halve the size of a chart's SVG without a visible change: drop texts for screen readers, empty paths and far decimals."""
    image = re.sub(r'<path class="(background" d="[^"]*"|foreground" d="" display="none")/>', "", image)
    image = re.sub(r' (aria-[a-z]+|role|class|pointer-events)="[^"]*"', "", image)
    rounded = lambda number: f"{float(number[0]):.1f}".removesuffix(".0")
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", rounded, tag[0]), image)


@dataclass(frozen=True)
class EmbeddedImage:
    """An image as the page's template takes it."""

    source: str
    """A data URI."""
    link: str | None
    """From the page's folder to the lossless file; None if the source is that file."""


def embed_image(file: Path, page: Path) -> EmbeddedImage:
    """Read a PNG for a page in the folder `page`; UserError if it is missing or damaged."""
    with reading(whole(file)):
        data = file.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB")
    if max(small.size) <= LARGE:
        return EmbeddedImage(_uri("png", data), None)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=QUALITY)
    return EmbeddedImage(_uri("webp", buffer.getvalue()), Path(os.path.relpath(file, page)).as_posix())


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
