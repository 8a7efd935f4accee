"""Charts as SVG files: no fonts or files from elsewhere, the same bytes for the same numbers."""

import io
import re

import matplotlib
import pandas as pd

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex

INK = "#808590"  # readable on light and on dark
FEW = 8  # lines that a legend in a panel names one by one
COLORS = (
    "#3b7dd8",
    "#d9822b",
    "#3d9970",
    "#a05fc0",
    "#c04f5f",
    "#6b7785",
    "#1fa2b8",
    "#b5a027",
    "#8a5a44",
    "#e377c2",
)  # one a method
STYLES = ("-", "--", ":", "-.")  # one a seed


def curves(
    runs: dict[tuple[str, int], pd.DataFrame], columns: dict[str, str], axes: dict[str, str], labels: dict[str, str]
) -> str:
    """Lines of every run, a row of panels for each column and a panel in it for each axis.

    runs: (method, seed) -> records; columns: column -> title; axes: column -> label of the x axis; labels: of methods.
    """
    methods, seeds = (list(dict.fromkeys(run[index] for run in runs)) for index in (0, 1))
    colors = COLORS if len(methods) <= len(COLORS) else [to_hex(color) for color in plt.get_cmap("tab20").colors]
    many = len(runs) > FEW
    name = lambda method, seed: f"{labels[method]}, seed {seed}" if not many else labels[method] if seed == seeds[0] else None
    settings = {
        "svg.hashsalt": "g2rpo", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with plt.rc_context(settings):
        figure, panels = plt.subplots(len(columns), len(axes), figsize=(4.6 * len(axes), 2.5 * len(columns)), squeeze=False)
        for row, (column, title) in zip(panels, columns.items()):
            for panel, (axis, label) in zip(row, axes.items()):
                for (method, seed), records in runs.items():
                    if column not in records:  # not every run measures every reward
                        continue
                    style = {
                        "color": colors[methods.index(method) % len(colors)],
                        "linestyle": STYLES[seeds.index(seed) % len(STYLES)],
                    }
                    panel.plot(records[axis], records[column], label=name(method, seed), linewidth=1.0 if many else 1.6, **style)
                panel.set_title(title, loc="left", fontsize=9)
                panel.set_xlabel(label)
                panel.grid(alpha=0.2, color=INK)
        if many:  # below the panels, a method once
            lines = panels[0][0].get_legend_handles_labels()
            figure.legend(*lines, loc="lower center", ncols=3, fontsize=7, frameon=False)
            figure.tight_layout(rect=(0, 0.16 * -(-len(methods) // 3) / figure.get_figheight() + 0.01, 1, 1))
        else:
            if runs:
                panels[0][0].legend(fontsize=7, frameon=False)
            figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return buffer.getvalue()


def inline(svg: str) -> str:
    """An SVG file's text as an element that takes the width of its page."""
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'class="chart" role="img"', svg[svg.index("<svg") :], count=1)
