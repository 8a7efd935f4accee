"""Draw docs/pictures/*.svg from the objects that run: `python -m tools.draw_explanations`. A test holds the committed ones equal.

Trees are those of `sampling.tree`, sigmas and noise those of `sampling`, settings those of the
profiles, results those of committed studies.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import torch

from g2rpo_core.algorithm.methods import LABELS, METHODS
from g2rpo_core.config import Profile, load_profile
from g2rpo_core.sampling.schedule import Grid, shifted_sigmas, sigma_at, tail
from g2rpo_core.sampling.transitions import SDES
from g2rpo_core.sampling.tree import Tree
from tools.draw_findings import draw_gains
from tools.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, WIDTH, Figure

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
GRANULARITY_COLORS = {1: BLUE, 2: GREEN, 3: PURPLE}


@cache
def profile(name: str) -> Profile:
    return load_profile(ROOT / "profiles" / f"{name}.yaml")


def build_tree(name: str, entry: str) -> Tree:
    """Build the tree of the first iteration of a profile's method, as its training does."""
    run = profile(name).run(entry)
    return run.method.tree.build(run.sampling.steps)


def draw_g2rpo_tree() -> Figure:
    """Draw G²RPO's tree on profile tiny."""
    tree, steps = build_tree("tiny", "g2rpo"), profile("tiny").sampling.steps
    group = profile("tiny").training.num_generations
    lanes = sum(len(ends) for ends in tree.leaves)
    figure = Figure(150 + 24 * lanes, "The rollout tree of G²RPO on profile tiny")
    nfe = tree.num_forward_evals(group)
    words = (
        f"G²RPO on profile tiny: T = {steps}, Λ = {{1, 2, 3}}, G = {group}: "
        f"{nfe} forward evaluations a prompt"
    )
    figure.text(20, 26, words, bold=True)
    _legend(figure, 52, group)
    _step_axis(figure, 86, steps, shift=profile("tiny").sampling.shift)
    _draw_tree(figure, tree, steps, top=122, lane=24)
    return figure


def draw_other_trees() -> Figure:
    """Draw the trees of the other methods on profile tiny."""
    noisy = [
        name
        for name in profile("tiny").methods
        if profile("tiny").run(name).method.tree.branching != "none"
    ]
    names = [name for name in noisy if name not in ("g2rpo", "g2rpo_no_mgai")]
    steps, group = profile("tiny").sampling.steps, profile("tiny").training.num_generations
    figure = Figure(100 + 66 * len(names), "The rollout trees of the other methods on profile tiny")
    _legend(figure, 26, group)
    _step_axis(figure, 60, steps, shift=profile("tiny").sampling.shift)
    for row, name in enumerate(names):
        tree = build_tree("tiny", name)
        top = 112 + 66 * row
        figure.text(
            20,
            top - 12,
            f"{LABELS[name]}: {tree.num_forward_evals(group)} forward evaluations a prompt",
            bold=True,
        )
        _draw_tree(figure, tree, steps, top=top + 8, lane=24)
    return figure


def _legend(figure: Figure, y: float, group: int) -> None:
    figure.circle(28, y - 4, 5, INK)
    figure.text(40, y, "called once")
    figure.circle(138, y - 4, 5, "#ffffff")
    figure.text(150, y, f"called once per member (× {group})")
    figure.line(366, y - 4, 388, y - 4, ORANGE, 4)
    figure.text(394, y, "SDE step")
    figure.line(470, y - 4, 492, y - 4, GREY, 1.5)
    figure.text(498, y, "ODE step")
    figure.box(575, y - 10, 11, 11, "#ffffff", BLUE)
    figure.text(594, y, "images, by λ")


def _x(step: float, steps: int) -> float:
    return 40 + step / steps * (WIDTH - 110)


def _step_axis(figure: Figure, y: float, steps: int, shift: float) -> None:
    for step in range(steps + 1):
        figure.text(_x(step, steps), y, f"{step}" if step < steps else "image", "middle", GREY, 12)
        figure.text(
            _x(step, steps), y + 14, f"σ {sigma_at(step, steps, shift):.2f}", "middle", GREY, 10
        )


def _draw_tree(figure: Figure, tree: Tree, steps: int, top: float, lane: float) -> None:
    """Draw a tree: steps to the right, one lane per leaf; the branch that leaves the anchor last is on top."""
    images = [
        (end, value)
        for ends in tree.leaves
        for value, end in zip(tree.granularities, ends, strict=True)
    ]
    parents = [node.parent for node in tree.nodes] + [
        end for end, _ in images
    ]  # the images follow the nodes
    children: dict[int, list[int]] = {index: [] for index in range(len(parents))}
    for index, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(index)
    lanes: dict[int, int] = {}

    def noisy(index: int) -> bool:
        return index < len(tree.nodes) and tree.nodes[index].noise is not None

    def place(index: int) -> int:
        """Place a node in the lane of its first child, which is noiseless if there is one; an image in a new lane."""
        below = [place(child) for child in sorted(children[index], key=noisy)]
        lanes[index] = below[0] if below else sum(other >= len(tree.nodes) for other in lanes)
        return lanes[index]

    place(0)
    y = lambda index: top + lane * lanes[index]
    x = lambda index: _x(tree.nodes[index].step if index < len(tree.nodes) else steps, steps)
    for index, parent in enumerate(parents):
        if parent is not None and index < len(tree.nodes):
            figure.line(
                x(parent),
                y(parent),
                x(index),
                y(index),
                ORANGE if noisy(index) else GREY,
                4 if noisy(index) else 1.5,
            )
    for index, (end, value) in enumerate(images, len(tree.nodes)):
        color = GRANULARITY_COLORS[value]
        figure.line(x(end), y(end), x(index), y(index), color)
        figure.box(x(index) - 5, y(index) - 5, 11, 11, "#ffffff", color)
        figure.text(x(index) + 14, y(index) + 4, f"λ = {value}", color=color, size=12)
    for index, node in enumerate(tree.nodes):
        figure.circle(x(index), y(index), 4.5, "#ffffff" if node.splits else INK)


def draw_noise_steps() -> Figure:
    """Draw at which steps each method of FLUX's profile adds noise."""
    names = [name for name, method in METHODS.items() if method.tree.branching != "none"]
    figure = Figure(84 + 34 * len(names), "Where noise enters, by method, at T = 16")
    figure.circle(28, 22, 6, ORANGE, ORANGE)
    figure.text(42, 26, "SDE step of the first iteration")
    figure.circle(258, 22, 6, "#ffffff", ORANGE)
    figure.text(272, 26, "SDE step of another iteration")
    figure.circle(488, 22, 2.5, GREY, GREY)
    figure.text(500, 26, "always an ODE step")
    steps = 16
    x = lambda step: 170 + step / (steps - 1) * (WIDTH - 210)
    for step in range(steps):
        figure.text(x(step), 56, str(step), "middle", GREY, 12)
    for row, name in enumerate(names):
        y = 84 + 34 * row
        tree = METHODS[name].tree
        figure.text(20, y + 4, LABELS[name])
        now = {step for branch in tree.branches(steps) for step in branch}
        for sde_step in tree.build(
            steps
        ).sde_steps:  # one that takes several steps of the grid at once
            if sde_step.span > 1:
                figure.line(x(sde_step.step), y, x(sde_step.step + sde_step.span), y, ORANGE, 4)
        for step in range(steps):
            if step in now or step in tree.candidates(steps):
                figure.circle(x(step), y, 6, ORANGE if step in now else "#ffffff", ORANGE)
            else:
                figure.circle(x(step), y, 2.5, GREY, GREY)
    return figure


def noise_std(sde: str, eta: float, sigmas: torch.Tensor) -> list[float]:
    """Return the standard deviation that a transition adds at each step but the last, by the function that training uses."""
    zero = torch.zeros(1, 1)
    return [
        float(SDES[sde](zero, zero, sigmas=sigmas, step=step, eta=eta).std)
        for step in range(len(sigmas) - 2)
    ]


def draw_noise_std() -> Figure:
    """Draw how much noise each kind of SDE step adds at T = 16."""
    sampling = profile("flux_hps_clip").sampling
    steps, sigmas = sampling.steps, shifted_sigmas(sampling.steps, sampling.shift)
    curves = [
        ("Flow-SDE, η = 0.7", "flow", 0.7, BLUE),
        ("Dance-SDE, η = 0.3", "dance", 0.3, ORANGE),
        ("CPS, η = 0.8", "cps", 0.8, GREEN),
    ]
    values = [noise_std(sde, eta, sigmas) for _, sde, eta, _ in curves]
    figure = Figure(400, f"Noise of one SDE step, T = {steps}, shift {sampling.shift:g}")
    _chart(
        figure,
        values,
        [(label, color) for label, _, _, color in curves],
        "standard deviation of the added noise",
        steps - 2,
    )
    figure.text(
        WIDTH / 2,
        390,
        f"step, from noise (0) to image; T = {steps}, shift {sampling.shift:g}",
        "middle",
        GREY,
        12,
    )
    return figure


def draw_sigmas() -> Figure:
    """Draw sigma by step, even and with FLUX's shift."""
    sampling = profile("flux_hps_clip").sampling
    curves = [shifted_sigmas(sampling.steps, shift).tolist() for shift in (1.0, sampling.shift)]
    figure = Figure(400, "Sigma at each step")
    labels = [
        ("shift 1: even steps", GREY),
        (f"shift {sampling.shift:g}: more steps near the noise", BLUE),
    ]
    _chart(figure, curves, labels, "sigma", sampling.steps)
    figure.text(WIDTH / 2, 390, "step, from noise (0) to image", "middle", GREY, 12)
    return figure


def _chart(
    figure: Figure,
    curves: Sequence[Sequence[float]],
    labels: Sequence[tuple[str, str]],
    title: str,
    last: int,
) -> None:
    """Draw lines over steps 0 … last."""
    left, right, top, bottom = 60, WIDTH - 30, 60, 350
    highest = max(max(curve) for curve in curves)
    unit = next(each for each in (0.1, 0.2, 0.5, 1.0) if highest / each <= 8)
    x = lambda step: left + step / last * (right - left)
    y = lambda value: bottom - value / highest * (bottom - top)
    figure.text(20, 26, title, bold=True)
    for number in range(int(highest / unit + 1e-6) + 1):
        figure.line(left, y(number * unit), right, y(number * unit), PALE, 1)
        figure.text(left - 8, y(number * unit) + 4, f"{number * unit:.1f}", "end", GREY, 12)
    for step in range(last + 1):
        figure.text(x(step), bottom + 20, str(step), "middle", GREY, 12)
    for row, (curve, (label, color)) in enumerate(zip(curves, labels, strict=True)):
        for step, (value, following) in enumerate(zip(curve, curve[1:], strict=False)):
            figure.line(x(step), y(value), x(step + 1), y(following), color, 2)
        for step, value in enumerate(curve):
            figure.circle(x(step), y(value), 3, color, color)
        figure.line(right - 270, 26 + 20 * row - 4, right - 245, 26 + 20 * row - 4, color, 3)
        figure.text(right - 237, 26 + 20 * row, label)


def draw_granularities() -> Figure:
    """Draw which steps the tails of each grid and granularity evaluate after SDE step 3 of 16."""
    steps, after = profile("flux_hps_clip").sampling.steps, 3
    rows = [(grid, value) for grid in get_args(Grid) for value in (1, 2, 3)]
    figure = Figure(110 + 30 * len(rows) + 30, f"Tails after SDE step {after} of T = {steps}")
    figure.text(
        20,
        26,
        f"Tails after SDE step {after} of T = {steps}: the calls of the model before the jump to "
        "the image",
        bold=True,
    )
    x = lambda step: 150 + step / steps * (WIDTH - 260)
    for step in range(steps + 1):
        figure.text(
            x(step) + 8 * (step == steps),
            58,
            str(step) if step < steps else "image",
            "middle",
            GREY,
            12,
        )
    for row, (grid, value) in enumerate(rows):
        y = 90.0 + 30 * row + 12 * (row // 3)
        if row % 3 == 0:
            figure.text(20, y + 4, grid, bold=True)
        figure.text(96, y + 4, f"λ = {value}", color=GRANULARITY_COLORS[value])
        path = tail(steps, after, value, grid)
        figure.line(x(after), y, x(path[0]), y, ORANGE, 4)
        for step, following in zip(path, [*path[1:], float(steps)], strict=True):
            figure.line(x(step), y, x(following), y, GRANULARITY_COLORS[value])
        for step in path:
            figure.circle(x(step), y, 4.5, GRANULARITY_COLORS[value], GRANULARITY_COLORS[value])
        figure.box(x(steps) - 5, y - 5, 11, 11, "#ffffff", GRANULARITY_COLORS[value])
        figure.text(x(steps) + 24, y + 4, f"{len(path)} calls", color=GREY, size=12)
    return figure


def costs(name: str, entry: str) -> tuple[int, int, int]:
    """Count the forward evaluations of one prompt: anchor and shared states, members before the tails, tails."""
    tree, group = build_tree(name, entry), profile(name).training.num_generations
    once = sum(1 for node in tree.nodes if not node.splits)
    tails = sum(group for node in tree.nodes if node.splits and node.tail)
    return once, tree.num_forward_evals(group) - once - tails, tails


def draw_cost() -> Figure:
    """Draw the forward evaluations of a prompt by method, on the profile of the paper's setting."""
    settings = profile("flux_hps_clip")
    names = [name for name in METHODS if name in settings.methods]
    figure = Figure(90 + 46 * len(names), "Forward evaluations a prompt, by method")
    title = (
        f"Forward evaluations a prompt, G = {settings.training.num_generations}, "
        "profile flux_hps_clip"
    )
    figure.text(20, 26, title, bold=True)
    parts = [
        ("once for the group", INK),
        ("once per member, before the tail", ORANGE),
        ("once per member, in tails", BLUE),
    ]
    for number, (words, color) in enumerate(parts):
        figure.box(20 + 230 * number, 40, 12, 12, color, color)
        figure.text(38 + 230 * number, 51, words, size=12)
    highest = max(sum(costs("flux_hps_clip", name)) for name in names)
    for row, name in enumerate(names):
        y, x = 76 + 46 * row, 150.0
        steps = settings.run(name).sampling.steps
        figure.text(20, y + 13, LABELS[name])
        figure.text(20, y + 28, f"T = {steps}", color=GREY, size=11)
        for value, (_, color) in zip(costs("flux_hps_clip", name), parts, strict=True):
            width = value / highest * (WIDTH - 220)
            if value:
                figure.box(x, y, width, 22, color, color)
            x += width
        figure.text(x + 8, y + 16, f"{sum(costs('flux_hps_clip', name)):,}")
    return figure


def data_way() -> list[tuple[str, str, str]]:
    """Return the way from prompts to the report: name, shape at FLUX's setting, and the folder that makes it."""
    settings = profile("flux_hps_clip")
    training, sampling = settings.training, settings.sampling
    run = settings.run("g2rpo")
    prompts, group = training.prompts_per_iteration, training.num_generations
    branches, tails, rewards = (
        len(run.method.tree.branches(run.sampling.steps)),
        len(run.method.tree.granularities),
        len(training.rewards),
    )
    tokens = sampling.height // 16 * (sampling.width // 16)
    images = prompts * branches * tails * group
    calls, length = (
        build_tree("flux_hps_clip", "g2rpo").num_forward_evals(group),
        settings.embed.max_sequence_length,
    )
    texts, tests, evaluation = (
        settings.prompts.train_count,
        settings.prompts.test_count,
        settings.evaluation,
    )
    size, product = f"{sampling.height}, {sampling.width}", f"{prompts}·{branches}·{tails}·{group}"
    axes, group_axes = (
        f"{rewards}, {prompts}, {branches}, {tails}, {group}",
        f"{prompts}, {branches}, {group}",
    )
    scored = (
        f"[{tests}, 3, {evaluation.height}, {evaluation.width}] and a row a prompt and reward, "
        "Parquet"
    )
    return [
        ("prompts", f"{texts:,} training texts, {tests} test texts, Parquet", "data/"),
        (
            "embeddings",
            f"T5 [{length}, 4096] and CLIP [768] a prompt, {settings.embed.dtype}, Parquet",
            "data/, stages/embed.py",
        ),
        (
            "rollout tree",
            f"{calls:,} calls a prompt; latents [N, {tokens}, 64]",
            "sampling/, models/",
        ),
        (
            "images",
            f"[N, 3, {size}] in [0, 1]; P·B·J·G = {product} = {images:,} an iteration",
            "models/",
        ),
        ("rewards", f"float32 [R, P, B, J, G] = [{axes}]", "rewards/"),
        (
            "advantages",
            f"float32 [P, B, G] = [{group_axes}], in ±{training.adv_clip_max:g}",
            "algorithm/advantage.py",
        ),
        (
            "update",
            "clipped loss of N states with M next states each",
            "training/, algorithm/loss.py",
        ),
        (
            "checkpoint",
            "weights, optimizer, records: resumes bit for bit; then runs/",
            "distributed/, training/loop.py",
        ),
        ("evaluation", scored, "evaluation/"),
        ("report", "one HTML file, Markdown, JSON, SVG", "reporting/"),
    ]


def draw_architecture() -> Figure:
    """Draw how data flows, with shapes and folders."""
    rows = data_way()
    figure = Figure(66 + 62 * len(rows), "How data flows from prompts to the report")
    figure.text(20, 28, "what", color=GREY, size=12)
    figure.text(210, 28, "shape, for G²RPO with profile flux_hps_clip", color=GREY, size=12)
    figure.text(WIDTH - 20, 28, "in g2rpo_core/", "end", GREEN, 12)
    loop = range(2, 7)
    top = lambda row: 42 + 62 * row
    figure.box(6, top(loop[0]) - 8, WIDTH - 12, 62 * len(loop) - 4, "#f4f7fc", PALE)
    figure.text(WIDTH - 20, top(loop[-1]) + 46, "one iteration of training", "end", BLUE, 11)
    for row, (name, shape, folder) in enumerate(rows):
        figure.box(20, top(row), 150, 36, "#ffffff", BLUE if row in loop else INK)
        figure.text(95, top(row) + 23, name, "middle", bold=True)
        figure.text(190, top(row) + 15, shape, size=12)
        figure.text(190, top(row) + 32, folder, color=GREEN, size=12)
        if row:
            figure.arrow(95, top(row - 1) + 36, 95, top(row), GREY)
    return figure


FIGURES = {
    "tree_g2rpo.svg": draw_g2rpo_tree,
    "trees.svg": draw_other_trees,
    "noise_steps.svg": draw_noise_steps,
    "noise_std.svg": draw_noise_std,
    "sigmas.svg": draw_sigmas,
    "granularities.svg": draw_granularities,
    "cost.svg": draw_cost,
    "architecture.svg": draw_architecture,
    "gains.svg": draw_gains,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    for name, draw in FIGURES.items():
        (folder / name).write_text(draw().svg())
        print(folder / name)


if __name__ == "__main__":
    main()
