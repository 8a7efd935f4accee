"""Draw the figure of studies/README.md, from the committed tables of studies."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from ruamel.yaml import YAML

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.reporting.recorded import gains_in, read_results
from g2rpo_core.reporting.statistics import spread
from tools.drawing import BLUE, GREY, ORANGE, PALE, WIDTH, Figure

STUDIES = Path(__file__).resolve().parent.parent / "studies"
LEFT, RIGHT, ROW = 290, WIDTH - 90, 24  # of the axis, and a row's height, in pixels


def gains(study: str) -> dict[str, list[float]]:
    """Return for each entry, by its label, the gain of every seed in the training reward, in the order of the seeds."""
    chosen = YAML(typ="safe", pure=True).load(STUDIES / study / "params.yaml")
    runs = gains_in(read_results(STUDIES / study / "results.parquet"))
    by_label = {}
    for name in chosen["methods"]:
        entry = chosen["entries"].get(name) or {}
        label = entry.get("label") or LABELS[entry.get("method") or name]
        by_label[label] = [runs[name, seed] for seed in chosen["seeds"]]
    return by_label


def draw_gains() -> Figure:
    """Draw what the verdict measured, the same in the second task, and what each choice of coarse-only G²RPO is worth."""
    judged, choices, late = gains("verdict"), gains("choices"), gains("marks_late")
    whole = {"G²RPO, all NFE", "G²RPO, coarse tails, a tenth"}  # other budgets
    methods = _best_first({label: values for label, values in judged.items() if label not in whole})
    first, *others = choices
    changed = {
        label: [value - base for value, base in zip(choices[label], choices[first])]
        for label in others
    }
    second = _best_first(late)
    rows = len(methods) + len(second) + len(changed)
    figure = Figure(254 + ROW * rows, "Gain in the training reward by method, and by choice")
    title = "Gain over the base at equal forward evaluations, eight fresh seeds, unseen prompts"
    below = _rows(figure, 26, title, "the base", methods)
    title = (
        "The same in a second task, in which fine detail counts; late: noise at steps 8–11 of 16"
    )
    below = _rows(figure, below + 26, title, "the base", second)
    title = "One choice of coarse-only G²RPO changed: the difference it makes, three seeds"
    unchanged = "unchanged: noise at one of steps 2–4 of 10, η = 0.7, tail λ = 3, groups of 12"
    below = _rows(figure, below + 26, title, unchanged, changed)
    words = (
        "Training reward: HPS-v2.1 + CLIP Score. A dot is a seed, "
        "a bar the mean with its 95 % interval over seeds. Scales differ."
    )
    figure.text(20, below + 6, words, color=GREY, size=12)
    return figure


def _best_first(seeds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return dict(sorted(seeds.items(), key=lambda item: -mean(item[1])))


def _rows(
    figure: Figure, top: float, title: str, zero: str, rows: Mapping[str, list[float]]
) -> float:
    """Draw one row per entry, with its seeds, mean and interval; zero: what 0 is. Return where the next part begins."""
    figure.text(20, top, title, bold=True)
    over_seeds = {label: spread(values) for label, values in rows.items()}
    low = min(0.0, *(min(over_seeds[label]["low"], *values) for label, values in rows.items()))
    high = max(0.0, *(max(over_seeds[label]["high"], *values) for label, values in rows.items()))
    x = lambda value: LEFT + (value - low) / (high - low) * (RIGHT - LEFT)
    bottom = top + 20 + ROW * len(rows)
    figure.line(x(0), top + 12, x(0), bottom, GREY, 1)
    figure.text(x(0), bottom + 14, zero, "middle", GREY, 12)
    for number, (label, values) in enumerate(rows.items()):
        middle, *interval = over_seeds[label].values()
        y, color = top + 28 + ROW * number, ORANGE if label.startswith("G²RPO") else BLUE
        figure.text(20, y + 4, label)
        figure.line(x(interval[0]), y, x(interval[1]), y, color, 2)
        for value in sorted(values):
            figure.circle(x(value), y, 2.5, PALE, color)
        figure.line(x(middle), y - 7, x(middle), y + 7, color, 4)
        figure.text(RIGHT + 14, y + 4, f"{middle:+.3f}".replace("-", "−"), color=color)
    return bottom + 30
