"""The report's charts: Vega-Lite by altair, interactive in the page, an SVG without scripts.

In the page, hovering shows values, and a click on a name in the legend hides the others. The page's
style sets the colours of text and lines (`svg text`), so that they are readable on light and dark
backgrounds.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import altair as alt
import pandas as pd
import vl_convert

from g2rpo_core.reporting.tables import Run, lines_of

INK = "#6f7683"  # for a separate SVG: readable on light and dark backgrounds
PALETTE = (
    "#3b7dd8",
    "#d9822b",
    "#2f9e6e",
    "#a05fc0",
    "#c04f5f",
    "#6b7785",
    "#1fa2b8",
    "#b5a027",
    "#8a5a44",
    "#e377c2",
)
VERSION = "6.4"  # of Vega-Lite, as altair writes it
PANELS = 3  # side by side
WIDTH, HEIGHT = 290, 150  # of a panel


def _methods(names: Sequence[str]) -> alt.Scale:
    """Return a colour for each name; beyond the palette, colours repeat."""
    colors = (
        {"range": list(PALETTE[: len(names)])}
        if len(names) <= len(PALETTE)
        else {"scheme": "tableau20"}
    )
    return alt.Scale(domain=list(names), **colors)


def forest(
    lines: pd.DataFrame,
    gains: pd.DataFrame,
    labels: Mapping[str, str],
    titles: Mapping[str, str],
    ends: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> dict | None:
    """Draw gains over the base as a forest plot: a row per method, a panel per reward.

    Seeds are dots, their mean a diamond with its interval. With fewer than three seeds, each seed
    shows its own interval, over prompts. lines: of every seed, method by method; gains: the same
    over seeds (`over_seeds`); labels: of methods; titles: of panels, by reward; ends: what the
    base and the task's own pictures score, by reward, for the titles of axes. Returns None if there
    is nothing to show.
    """
    if not len(lines):
        return None
    names = [labels[name] for name in dict.fromkeys(gains.method)]
    order = [titles[name] for name in dict.fromkeys(gains.reward)]
    place = lambda line: {
        "method": labels[line.method],
        "column": titles[line.reward],
        "gain": line.difference,
    }
    interval = lambda line: {"low": line.low, "high": line.high} if line.known else {}
    seeds = [place(line) | {"seed": str(line.seed)} | interval(line) for line in lines_of(lines)]
    means = [place(line) | interval(line) for line in lines_of(gains) if line.known]
    axes = {
        titles[name]: f"base {floor:.3f}, task's own pictures {ceiling - floor:+.3f}"
        for name, (floor, ceiling) in ends.items()
    }
    panels = [
        _forest_panel(title, axes.get(title), seeds, means, names, title == order[0])
        for title in order
    ]
    return _spec(alt.concat(*panels, columns=4, spacing=14))


def _forest_panel(
    title: str,
    axis_title: str | None,
    seeds: list[dict],
    means: list[dict],
    names: list[str],
    labelled: bool,
) -> alt.LayerChart:
    """Draw the rows of one column; labelled: with the names of methods beside it."""
    rows = lambda table: alt.Chart(
        alt.Data(values=[row for row in table if row["column"] == title])
    )
    # Encodings
    about = {"titleFontWeight": "normal", "titleFontSize": 10}
    x = alt.X("gain:Q", title=axis_title, axis=alt.Axis(format="+~g", tickCount=4, **about))
    axis = alt.Axis(labels=labelled, ticks=False, labelLimit=210)
    y = alt.Y("method:N", sort=names, title=None, axis=axis)
    color = alt.Color("method:N", scale=_methods(names), legend=None)
    shown = [
        alt.Tooltip("method:N"),
        *(alt.Tooltip(f"{what}:Q", format="+.4f") for what in ("gain", "low", "high")),
    ]
    # Layers
    zero = alt.Chart(alt.Data(values=[{"gain": 0}]))
    zero = zero.mark_rule(strokeDash=[3, 3], color=INK).encode(x="gain:Q")
    bars = rows([row for row in means or seeds if "low" in row]).mark_rule(strokeWidth=2)
    bars = bars.encode(
        x=alt.X("low:Q", title=axis_title), x2="high:Q", y=y, color=color, tooltip=shown
    )
    dots = rows(seeds).mark_circle(size=34, opacity=0.55)
    dots = dots.encode(x=x, y=y, color=color, tooltip=[*shown, alt.Tooltip("seed:N")])
    if means:
        diamonds = rows(means).mark_point(shape="diamond", filled=True, size=90, opacity=1)
        layers = [zero, bars, dots, diamonds.encode(x=x, y=y, color=color, tooltip=shown)]
    else:  # each seed has its own interval: one below the other
        layers = [zero, *(layer.encode(yOffset="seed:N") for layer in (bars, dots))]
    return alt.layer(*layers).properties(
        title=alt.Title(title, anchor="start", fontSize=12),
        width=220,
        height=max(60, 22 * len(names)),
    )


def curves(
    runs: Mapping[Run, pd.DataFrame],
    columns: Mapping[str, str],
    axes: Mapping[str, str],
    labels: Mapping[str, str],
) -> dict | None:
    """Draw every run as a faint line, and every method's mean and its band over seeds.

    The band is from the lowest to the highest seed. runs: (method, seed) -> records; columns:
    column -> title of its panel; axes: column -> label, between which the page can switch, the
    first of them iterations; labels: of methods. Return None without runs.
    """
    points = _points(runs, columns, axes, labels)
    if not points:
        return None
    # What all panels share: the axis to choose, methods to hide, and colours
    names = [labels[name] for name in dict.fromkeys(method for method, _ in runs)]
    first = next(iter(axes.values()))
    axis = alt.param(
        "axis", value=first, bind=alt.binding_radio(options=list(axes.values()), name="against ")
    )
    chosen = alt.selection_point("chosen", fields=["method"], bind="legend")
    color = alt.Color(
        "method:N",
        scale=_methods(names),
        sort=names,
        legend=alt.Legend(
            title=None,
            orient="bottom",
            columns=4,
            labelLimit=260,
            symbolOpacity=1,
            symbolType="stroke",
            symbolStrokeWidth=3,
        ),
    )
    panels = [_curve_panel(title, points, color, chosen) for title in columns.values()]
    # altair warns that all panels share one selection, as they are meant to
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Automatically deduplicated selection parameter")
        together = alt.concat(*panels, columns=PANELS, spacing=18)
        return _spec(together.add_params(axis, chosen))


def _curve_panel(
    title: str, points: list[dict], color: alt.Color, chosen: alt.Parameter
) -> alt.LayerChart:
    """Draw one reward: the band, the seeds, and the mean; chosen: the methods in the legend."""
    data = alt.Data(values=[point for point in points if point["panel"] == title])
    base = alt.Chart(data).transform_calculate(position="datum[axis]")
    over = base.transform_aggregate(
        mean="mean(value)", low="min(value)", high="max(value)", groupby=["method", "position"]
    )
    # Encodings
    x = alt.X("position:Q", title=None, axis=alt.Axis(tickCount=6, format="~s"))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    when = lambda on, off: alt.when(chosen).then(alt.value(on)).otherwise(alt.value(off))
    shown = [
        alt.Tooltip("method:N"),
        alt.Tooltip("position:Q", title="at", format=","),
        *(alt.Tooltip(f"{what}:Q", format=".4f") for what in ("mean", "low", "high")),
    ]
    # Layers
    band = over.mark_area().encode(
        x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=color, opacity=when(0.12, 0.01)
    )
    faint = base.mark_line(strokeWidth=1).encode(
        x=x, y=y, color=color, detail="seed:N", opacity=when(0.3, 0.03)
    )
    line = over.mark_line(strokeWidth=2.2, point=alt.OverlayMarkDef(size=18)).encode(
        x=x,
        y=alt.Y("mean:Q", title=None, scale=alt.Scale(zero=False)),
        color=color,
        opacity=when(1, 0.06),
        tooltip=shown,
    )
    return alt.layer(band, faint, line).properties(
        title=alt.Title(title, anchor="start", fontSize=12), width=WIDTH, height=HEIGHT
    )


def _points(
    runs: Mapping[Run, pd.DataFrame],
    columns: Mapping[str, str],
    axes: Mapping[str, str],
    labels: Mapping[str, str],
) -> list[dict]:
    """Return a point for every value.

    Its place on each axis is the mean over the method's seeds, so that they are one above another.
    """
    if not runs:
        return []
    everything = [records.assign(method=method) for (method, _), records in runs.items()]
    places = pd.concat(everything).groupby(["method", "iteration"])[list(axes)].mean()
    return [
        {"method": labels[method], "seed": str(seed), "panel": title, "value": row[column]}
        | {label: places.at[(method, row["iteration"]), axis] for axis, label in axes.items()}
        for (method, seed), records in runs.items()
        for column, title in columns.items()
        if column in records
        for row in records.to_dict("records")
    ]


def _spec(chart: alt.Chart) -> dict:
    """Return the chart's Vega-Lite specification as JSON values, deterministically."""
    return json.loads(
        chart.configure(background="transparent", font="system-ui, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=INK,
            titleColor=INK,
            gridColor=INK,
            gridOpacity=0.2,
            domainColor=INK,
            tickColor=INK,
        )
        .configure_legend(labelColor=INK, titleColor=INK)
        .configure_title(color=INK)
        .to_json(indent=None)
    )


def svg(spec: dict | None) -> str:
    """Return the chart as the text of an SVG file; an empty SVG for None."""
    if spec is None:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>\n'
    with _bundled_fonts():
        return vl_convert.vegalite_to_svg(spec, vl_version=VERSION)


@contextmanager
def _bundled_fonts() -> Iterator[None]:
    """Let vl-convert measure text with its bundled fonts alone, so that charts have equal bytes.

    At its first chart it adds the fonts that fontconfig finds: an installed Liberation Sans moved
    a chart's edge by a pixel.
    """
    before = os.environ.get("FONTCONFIG_FILE")
    with TemporaryDirectory() as empty:
        listed = Path(empty, "fonts.conf")
        listed.write_text(f"<fontconfig><dir>{empty}</dir></fontconfig>")
        os.environ["FONTCONFIG_FILE"] = str(listed)
        try:
            yield
        finally:
            del os.environ["FONTCONFIG_FILE"]
            if before is not None:
                os.environ["FONTCONFIG_FILE"] = before


def library() -> str:
    """Return the JavaScript of vega-embed, Vega-Lite and Vega, for a page without downloads."""
    # Its stub asks for arguments that have defaults
    return vl_convert.javascript_bundle(vl_version=VERSION)  # type: ignore[call-arg]
