"""The report's two forms from one context: Jinja templates beside this file."""

import json

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from g2rpo_core.reporting.charts import library, svg
from g2rpo_core.reporting.tables import tone
from g2rpo_core.texts import markdown, steering, unsteered

CHARTS = ("forest", "curves")


def render(context: dict) -> dict[str, str]:
    """The report's files by name, from a context of `build_context`: report.html, report.md, and each chart as an image."""
    environment = Environment(
        loader=PackageLoader("g2rpo_core.reporting"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: (
            unsteered(value) if isinstance(value, str) and not isinstance(value, Markup) and steering(value) else value
        ),
    )
    environment.filters["tone"] = tone
    environment.filters["script"] = in_script
    environment.filters["literal"] = markdown
    environment.globals["library"] = library
    images = {name: svg(context[name]) for name in CHARTS}
    shown = context | {"images": {name: Markup(image) for name, image in images.items()}}
    texts = {name: environment.get_template(f"{name}.j2").render(shown) for name in ("report.html", "report.md")}
    return texts | {f"{name}.svg": image for name, image in images.items()}


def in_script(value: object) -> Markup:
    """JSON that cannot end the script element, whatever text it holds."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))
