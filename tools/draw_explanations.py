"""Draw the charts in docs/pictures from the code and the committed studies.

`python -m tools.draw_explanations` writes them. The diagrams beside them (trees, noise_steps,
granularities, architecture) are drawn by hand.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import altair as alt
import pandas as pd
import torch
from ruamel.yaml import YAML

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config import Profile, load_profile
from g2rpo_core.estimate.cards import CARDS
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import Work
from g2rpo_core.reporting import charts
from g2rpo_core.reporting.recorded import gains_in, read_results
from g2rpo_core.reporting.statistics import spread
from g2rpo_core.sampling.schedule import shifted_sigmas
from g2rpo_core.sampling.transitions import SDES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 560  # of a chart without its labels
BLUE, ORANGE, GREEN, GREY = "#2456a6", "#d9660a", "#1f7a4d", "#8a8a8a"
STEP = alt.X("step:Q", title="step, from noise (0) to image", axis=alt.Axis(grid=False))
# Parts of a rollout's forward evaluations, by their color
PARTS = {
    "once for the group": "#222222",
    "once per member, before the tail": ORANGE,
    "once per member, in tails": BLUE,
}
OTHER_BUDGETS = ("G²RPO, all NFE", "G²RPO, coarse tails, a tenth")  # of the study `verdict`
RATES = ("equal_compute_rates", "equal_compute_rates_more", "cliffs")
HACKED = {"heldout_verifier": "gain in the verifier", "heldout_color": "gain in colour"}
# Of the seven entries of `words_equal`
ENTRY_COLORS = (BLUE, ORANGE, GREEN, "#a62c6b", "#6b6bd6", "#222222", GREY)
SEEDS = "A dot is a seed, a bar the mean with its 95 % interval over seeds. Scales differ."


def paper_setting() -> Profile:
    return load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")


def data(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)))


def names(field: str, order: Iterable[str]) -> alt.Y:
    """Give each name a row, in this order."""
    return alt.Y(f"{field}:N", sort=list(order), title=None, axis=alt.Axis(labelLimit=330))


def colors(field: str, by_name: Mapping[str, str]) -> alt.Color:
    """Color by name, with a legend on top."""
    scale = alt.Scale(domain=list(by_name), range=list(by_name.values()))
    return alt.Color(f"{field}:N", scale=scale, title=None, legend=alt.Legend(orient="top"))


def draw_curves(title: str, series: Mapping[str, Sequence[float]]) -> alt.Chart:
    """Draw lines over steps."""
    rows = [
        {"label": label, "step": step, "value": value}
        for label, values in series.items()
        for step, value in enumerate(values)
    ]
    color = colors("label", dict(zip(series, (BLUE, ORANGE, GREEN))))
    lines = data(rows).mark_line(point=True)
    lines = lines.encode(x=STEP, y=alt.Y("value:Q", title=title), color=color)
    return lines.properties(width=WIDTH, height=280)


def draw_noise_std() -> alt.Chart:
    """Draw how much noise each kind of SDE step adds, by the function that training uses."""
    sampling, zero = paper_setting().sampling, torch.zeros(1, 1)
    sigmas = shifted_sigmas(sampling.steps, sampling.shift)
    std = lambda sde, eta, step: SDES[sde](zero, zero, sigmas=sigmas, step=step, eta=eta).std
    kinds = {"Flow-SDE": ("flow", 0.7), "Dance-SDE": ("dance", 0.3), "CPS": ("cps", 0.8)}
    series = {
        f"{label}, η = {eta}": [float(std(sde, eta, step)) for step in range(sampling.steps - 1)]
        for label, (sde, eta) in kinds.items()
    }
    title = f"std of the noise, T = {sampling.steps}, shift {sampling.shift:g}"
    return draw_curves(title, series)


def draw_sigmas() -> alt.Chart:
    """Draw sigma by step, even and with FLUX's shift."""
    sampling = paper_setting().sampling
    labels = {1.0: "even steps", sampling.shift: "more steps near the noise"}
    series = {
        f"shift {shift:g}: {words}": shifted_sigmas(sampling.steps, shift).tolist()
        for shift, words in labels.items()
    }
    return draw_curves("sigma", series)


def costs(profile: Profile, entry: str) -> list[float]:
    """Count a prompt's forward evaluations, in the mean over a run's trees.

    Those of the group, of members before tails, and in tails.
    """
    work = Work(profile, entry, Machines(1, CARDS["h200"].memory), None)
    counts = []
    for tree in work.trees:
        once = sum(1 for node in tree.nodes if not node.splits)
        tails = sum(work.group for node in tree.nodes if node.splits and node.tail)
        counts.append((once, tree.num_forward_evals(work.group) - once - tails, tails))
    return [mean(part) for part in zip(*counts)]


def draw_cost() -> alt.LayerChart:
    """Draw the forward evaluations of a prompt by method, at the paper's setting."""
    profile = paper_setting()
    label = lambda name: f"{LABELS[name]}, T = {profile.run(name).sampling.steps}"
    entries = {label(name): costs(profile, name) for name in LABELS if name in profile.methods}
    rows = [
        {"method": method, "part": part, "count": count, "order": number}
        for method, counts in entries.items()
        for number, (part, count) in enumerate(zip(PARTS, counts))
    ]
    totals = [{"method": method, "count": sum(counts)} for method, counts in entries.items()]
    title = f"forward evaluations a prompt, mean of a run, G = {profile.training.num_generations}"
    x, y = alt.X("count:Q", title=title, axis=alt.Axis(grid=False)), names("method", entries)
    bars = data(rows).mark_bar().encode(x=x, y=y, color=colors("part", PARTS), order="order:Q")
    text = data(totals).mark_text(align="left", dx=5)
    return alt.layer(
        bars, text.encode(x=x, y=y, text=alt.Text("count:Q", format=",.0f"))
    ).properties(width=WIDTH)


def recorded(study: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return a study's settings and its table of results."""
    folder = ROOT / "studies" / study
    chosen = YAML(typ="safe", pure=True).load(folder / "params.yaml")
    return chosen, read_results(folder / "results.parquet")


def gains(study: str) -> dict[str, list[float]]:
    """Return the training reward's gain of every seed, by the entry's label."""
    chosen, table = recorded(study)
    runs, by_label = gains_in(table), {}
    for name in chosen["methods"]:
        entry = chosen["entries"].get(name) or {}
        label = entry.get("label") or LABELS[entry.get("method") or name]
        by_label[label] = [runs[name, seed] for seed in chosen["seeds"]]
    return by_label


def draw_gains() -> alt.VConcatChart:
    """Draw what the verdict measured, a second task, and single choices of coarse-only G²RPO."""
    judged, late, choices = gains("verdict"), gains("marks_late"), gains("choices")
    judged = {label: own for label, own in judged.items() if label not in OTHER_BUDGETS}
    unchanged = choices.pop(next(iter(choices)))
    changed = {label: [a - b for a, b in zip(own, unchanged)] for label, own in choices.items()}
    best_first = lambda seeds: dict(sorted(seeds.items(), key=lambda item: -mean(item[1])))
    parts = [
        draw_seeds(
            "Gain at equal forward evaluations: eight fresh seeds, unseen prompts",
            "gain over the base",
            best_first(judged),
        ),
        draw_seeds(
            "A second task, of fine detail; late: noise at steps 8–11 of 16",
            "gain over the base",
            best_first(late),
        ),
        draw_seeds(
            "One choice of coarse-only G²RPO changed: three seeds",
            "difference to noise at one of steps 2–4 of 10, η = 0.7, tail λ = 3, groups of 12",
            changed,
        ),
    ]
    title = alt.Title("Training reward: HPS-v2.1 + CLIP Score", subtitle=SEEDS, offset=14)
    return alt.vconcat(*parts, title=title)


def draw_seeds(title: str, axis: str, seeds: Mapping[str, Sequence[float]]) -> alt.LayerChart:
    """Draw a row per entry: every seed, their mean and its interval."""
    rows = [{"label": label, "gain": gain} for label, own in seeds.items() for gain in own]
    means = data({"label": label, **spread(own)} for label, own in seeds.items())
    x = alt.X("gain:Q", title=axis, axis=alt.Axis(grid=False, format="+~g"))
    own = alt.when("test(/^G²RPO/, datum.label)").then(alt.value(ORANGE)).otherwise(alt.value(BLUE))
    both = {"y": names("label", seeds), "color": own}
    shown = means.mark_text(align="left").encode(
        x=alt.value(WIDTH - 150), text=alt.Text("difference:Q", format="+.3f"), **both
    )
    layers = alt.layer(
        data([{"gain": 0}]).mark_rule(color=GREY).encode(x=x),
        means.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q", **both),
        data(rows).mark_circle(size=26, opacity=0.5).encode(x=x, **both),
        means.mark_tick(thickness=4, size=14).encode(x="difference:Q", **both),
        shown,
    )
    return layers.properties(title=title, width=WIDTH - 160)


def gains_by_rate() -> list[dict[str, Any]]:
    """Return the training reward's gain on each base of development: method, rate, base, gain."""
    rows = []
    for study in RATES:
        chosen, table = recorded(study)
        for (name, base), gain in gains_in(table).items():
            label, rate = chosen["entries"][name]["label"].rsplit(", ", 1)
            rows.append({"method": label, "rate": float(rate), "base": str(base), "gain": gain})
    return rows


def draw_rates() -> alt.FacetChart:
    """Draw the gain by learning rate, a panel a method; collapses end at its lower edge."""
    rows = gains_by_rate()
    x = alt.X("rate:Q", title="learning rate", scale=alt.Scale(type="log"))
    x.axis = alt.Axis(values=[1e-5, 1e-4], format=".0e", grid=False)
    y = alt.Y("gain:Q", title="gain", scale=alt.Scale(domain=[-0.1, 0.1], clamp=True))
    y.axis = alt.Axis(values=[-0.1, 0, 0.1], format="+~g", gridColor="#dddddd")
    every = alt.Chart()
    panel = alt.layer(
        every.mark_line(opacity=0.35, color=GREY).encode(x=x, y=y, detail="base:N"),
        every.mark_line(point=alt.OverlayMarkDef(size=20), color=BLUE).encode(
            x=x, y=alt.Y("mean(gain):Q", title="gain")
        ),
        width=105,
        height=95,
    )
    facet = alt.Facet(
        "method:N", title=None, sort=list(dict.fromkeys(row["method"] for row in rows))
    )
    return panel.facet(facet, columns=5, data=alt.Data(values=rows)).properties(
        title="Training reward by learning rate, down to −0.1: three bases, and their mean"
    )


def held_out_curves(study: str) -> list[dict[str, Any]]:
    """Return every entry's held-out gains as it trains, in the mean over bases."""
    chosen, table = recorded(study)
    curves = table[table.part == "training"].set_index(["method", "seed"])
    held_out = curves[["heldout_ocr", *HACKED]]
    gained = held_out - held_out.groupby(level=[0, 1]).transform("first")
    gained["at"] = gained.groupby(level=[0, 1]).cumcount()
    return [
        {"entry": chosen["entries"][method]["label"], "judge": label, "at": int(at)}
        | {"reward": float(row.heldout_ocr), "gain": float(row[judge])}
        for (method, at), row in gained.groupby(["method", "at"], sort=False).mean().iterrows()
        for judge, label in HACKED.items()
    ]


def draw_equal_reward() -> alt.FacetChart:
    """Draw what each entry of `words_equal` loses while OCR rises."""
    rows = held_out_curves("words_equal")
    labels = list(dict.fromkeys(row["entry"] for row in rows))
    x = alt.X("reward:Q", title="gain in OCR")
    x.axis = alt.Axis(values=[-0.05, 0, 0.05], format="+~g", grid=False)
    y = alt.Y("gain:Q", title=None, axis=alt.Axis(format="+~g", gridColor="#dddddd"))
    lines = alt.Chart().mark_line(point=alt.OverlayMarkDef(size=20))
    color = colors("entry", dict(zip(labels, ENTRY_COLORS, strict=True)))
    lines = lines.encode(x=x, y=y, color=color, order="at:Q").properties(width=250, height=230)
    facet = alt.Facet("judge:N", title=None, sort=list(HACKED.values()))
    chart = lines.facet(facet, columns=2, data=alt.Data(values=rows))
    return chart.resolve_scale(y="independent").properties(
        title="What is lost while OCR rises: means over six bases, a dot a measurement"
    )


FIGURES = {
    "noise_std.svg": draw_noise_std,
    "sigmas.svg": draw_sigmas,
    "cost.svg": draw_cost,
    "gains.svg": draw_gains,
    "rates.svg": draw_rates,
    "equal_reward.svg": draw_equal_reward,
}


def svg(name: str) -> str:
    """Return the text of a chart's file."""
    # A reader's sans-serif may be wider than the one measured here: leave room at the sides
    room = {"left": 40, "right": 80, "top": 5, "bottom": 5}
    chart = FIGURES[name]().configure(
        background="white", font="sans-serif", aria=False, padding=room
    )
    chart = chart.configure_legend(columnPadding=50)
    chart = chart.configure_title(anchor="start", frame="group", fontSize=13)
    return charts.svg(chart.configure_view(stroke=None).to_dict())


def main() -> None:
    """Write all charts."""
    for name in FIGURES:
        (FOLDER / name).write_text(svg(name))
        print(FOLDER / name)


if __name__ == "__main__":
    main()
