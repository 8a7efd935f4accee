"""Draws docs/pictures/*.svg from the objects that run: `python -m tools.draw_explanations`. A test holds the committed ones equal.

Trees are those of `rollout.tree`, sigmas and noise those of `sampling`, settings those of the profiles, results those of committed studies.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import torch

from g2rpo_core.algorithm.methods import LABELS, METHODS, Method
from g2rpo_core.config import Profile, load_profile, method_of, sampling_of
from g2rpo_core.rollout.tree import Tree
from g2rpo_core.sampling.schedule import Grid, shifted_sigmas, sigma_at, tail
from g2rpo_core.sampling.transitions import SDES
from tools.draw_findings import draw_gains
from tools.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, WIDTH, Picture

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
OF_GRANULARITY = {1: BLUE, 2: GREEN, 3: PURPLE}


@cache
def profile(name: str) -> Profile:
    return load_profile(ROOT / "profiles" / f"{name}.yaml")


def method_and_steps(name: str, entry: str) -> tuple[Method, int]:
    """A profile's method with its departures, and its T."""
    found = profile(name)
    return method_of(found.methods, entry), sampling_of(found.sampling, found.methods, entry).steps


def tree_of(name: str, entry: str) -> Tree:
    """The tree of the first iteration of a profile's method, as its training builds it."""
    method, steps = method_and_steps(name, entry)
    return method.tree(steps)


def draw_g2rpo_tree() -> Picture:
    """G²RPO's tree on profile tiny."""
    tree, steps = tree_of("tiny", "g2rpo"), profile("tiny").sampling.steps
    group = profile("tiny").training.num_generations
    lanes = sum(len(ends) for ends in tree.leaves)
    picture = Picture(150 + 24 * lanes, "The rollout tree of G²RPO on profile tiny")
    nfe = tree.num_forward_evals(group)
    words = f"G²RPO on profile tiny: T = {steps}, Λ = {{1, 2, 3}}, G = {group}: {nfe} forward evaluations a prompt"
    picture.text(20, 26, words, bold=True)
    _legend(picture, 52, group)
    _step_axis(picture, 86, steps, shift=profile("tiny").sampling.shift)
    _draw_tree(picture, tree, steps, top=122, lane=24)
    return picture


def draw_other_trees() -> Picture:
    """The trees of the other methods on profile tiny."""
    names = [name for name in profile("tiny").methods if name not in ("g2rpo", "g2rpo_no_mgai")]
    steps, group = profile("tiny").sampling.steps, profile("tiny").training.num_generations
    picture = Picture(100 + 66 * len(names), "The rollout trees of the other methods on profile tiny")
    _legend(picture, 26, group)
    _step_axis(picture, 60, steps, shift=profile("tiny").sampling.shift)
    for row, name in enumerate(names):
        tree = tree_of("tiny", name)
        top = 112 + 66 * row
        picture.text(20, top - 12, f"{LABELS[name]}: {tree.num_forward_evals(group)} forward evaluations a prompt", bold=True)
        _draw_tree(picture, tree, steps, top=top + 8, lane=24)
    return picture


def _legend(picture: Picture, y: float, group: int) -> None:
    picture.circle(28, y - 4, 5, INK)
    picture.text(40, y, "called once")
    picture.circle(138, y - 4, 5, "#ffffff")
    picture.text(150, y, f"called once per member (× {group})")
    picture.line(366, y - 4, 388, y - 4, ORANGE, 4)
    picture.text(394, y, "SDE step")
    picture.line(470, y - 4, 492, y - 4, GREY, 1.5)
    picture.text(498, y, "ODE step")
    picture.box(575, y - 10, 11, 11, "#ffffff", BLUE)
    picture.text(594, y, "images, by λ")


def _x(step: float, steps: int) -> float:
    return 40 + step / steps * (WIDTH - 110)


def _step_axis(picture: Picture, y: float, steps: int, shift: float) -> None:
    for step in range(steps + 1):
        picture.text(_x(step, steps), y, f"{step}" if step < steps else "image", "middle", GREY, 12)
        picture.text(_x(step, steps), y + 14, f"σ {sigma_at(step, steps, shift):.2f}", "middle", GREY, 10)


def _draw_tree(picture: Picture, tree: Tree, steps: int, top: float, lane: float) -> None:
    """Steps to the right, a lane for each leaf; the branch that leaves the anchor last is on top."""
    images = [(end, value) for ends in tree.leaves for value, end in zip(tree.granularities, ends, strict=True)]
    parents = [node.parent for node in tree.nodes] + [end for end, _ in images]  # the images stand after the nodes
    children: dict[int, list[int]] = {index: [] for index in range(len(parents))}
    for index, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(index)
    lanes: dict[int, int] = {}

    def noisy(index: int) -> bool:
        return index < len(tree.nodes) and tree.nodes[index].noise is not None

    def place(index: int) -> int:
        """The lane of the first child, which is noiseless if there is one; a new lane for an image."""
        below = [place(child) for child in sorted(children[index], key=noisy)]
        lanes[index] = below[0] if below else sum(other >= len(tree.nodes) for other in lanes)
        return lanes[index]

    place(0)
    y = lambda index: top + lane * lanes[index]
    x = lambda index: _x(tree.nodes[index].step if index < len(tree.nodes) else steps, steps)
    for index, parent in enumerate(parents):
        if parent is not None and index < len(tree.nodes):
            picture.line(x(parent), y(parent), x(index), y(index), ORANGE if noisy(index) else GREY, 4 if noisy(index) else 1.5)
    for index, (end, value) in enumerate(images, len(tree.nodes)):
        color = OF_GRANULARITY[value]
        picture.line(x(end), y(end), x(index), y(index), color)
        picture.box(x(index) - 5, y(index) - 5, 11, 11, "#ffffff", color)
        picture.text(x(index) + 14, y(index) + 4, f"λ = {value}", color=color, size=12)
    for index, node in enumerate(tree.nodes):
        picture.circle(x(index), y(index), 4.5, "#ffffff" if node.splits else INK)


def draw_noise_steps() -> Picture:
    """At which steps each method of FLUX's profile adds noise."""
    names = list(METHODS)
    picture = Picture(84 + 34 * len(names), "Where noise enters, by method, at T = 16")
    picture.circle(28, 22, 6, ORANGE, ORANGE)
    picture.text(42, 26, "SDE step of the first iteration")
    picture.circle(258, 22, 6, "#ffffff", ORANGE)
    picture.text(272, 26, "SDE step of another iteration")
    picture.circle(488, 22, 2.5, GREY, GREY)
    picture.text(500, 26, "always an ODE step")
    left, wide = 170, WIDTH - 210
    for row, name in enumerate(names):
        y = 84 + 34 * row
        method, steps = METHODS[name], 16
        if not row:
            for step in range(steps):
                picture.text(left + step / (steps - 1) * wide, 56, str(step), "middle", GREY, 12)
        picture.text(20, y + 4, LABELS[name])
        now = {step for branch in method.branches(steps) for step in branch}
        for sde_step in method.tree(steps).sde_steps:  # one that takes several steps of the grid at once
            if sde_step.span > 1:
                ends = (left + step / (steps - 1) * wide for step in (sde_step.step, sde_step.step + sde_step.span))
                picture.line(next(ends), y, next(ends), y, ORANGE, 4)
        for step in range(steps):
            x = left + step / (steps - 1) * wide
            if step in now:
                picture.circle(x, y, 6, ORANGE, ORANGE)
            elif step in method.candidates(steps):
                picture.circle(x, y, 6, "#ffffff", ORANGE)
            else:
                picture.circle(x, y, 2.5, GREY, GREY)
    return picture


def noise_std(sde: str, eta: float, sigmas: torch.Tensor) -> list[float]:
    """The standard deviation that a transition adds at each step but the last, by the function that training uses."""
    zero = torch.zeros(1, 1)
    return [float(SDES[sde](zero, zero, sigmas=sigmas, step=step, eta=eta).std) for step in range(len(sigmas) - 2)]


def draw_noise_std() -> Picture:
    """How much noise each kind of SDE step adds at T = 16."""
    sampling = profile("flux_hps_clip").sampling
    steps, sigmas = sampling.steps, shifted_sigmas(sampling.steps, sampling.shift)
    curves = [
        ("Flow-SDE, η = 0.7", "flow", 0.7, BLUE),
        ("Dance-SDE, η = 0.3", "dance", 0.3, ORANGE),
        ("CPS, η = 0.8", "cps", 0.8, GREEN),
    ]
    values = [noise_std(sde, eta, sigmas) for _, sde, eta, _ in curves]
    picture = Picture(400, f"Noise of one SDE step, T = {steps}, shift {sampling.shift:g}")
    _chart(picture, values, [(label, color) for label, _, _, color in curves], "standard deviation of the added noise", steps - 2)
    picture.text(WIDTH / 2, 390, f"step, from noise (0) to image; T = {steps}, shift {sampling.shift:g}", "middle", GREY, 12)
    return picture


def draw_sigmas() -> Picture:
    """Sigma by step, even and with FLUX's shift."""
    sampling = profile("flux_hps_clip").sampling
    curves = [shifted_sigmas(sampling.steps, shift).tolist() for shift in (1.0, sampling.shift)]
    picture = Picture(400, "Sigma at each step")
    labels = [("shift 1: even steps", GREY), (f"shift {sampling.shift:g}: more steps near the noise", BLUE)]
    _chart(picture, curves, labels, "sigma", sampling.steps)
    picture.text(WIDTH / 2, 390, "step, from noise (0) to image", "middle", GREY, 12)
    return picture


def _chart(picture: Picture, curves: Sequence[Sequence[float]], labels: Sequence[tuple[str, str]], title: str, last: int) -> None:
    """Lines over steps 0 … last."""
    left, right, top, bottom = 60, WIDTH - 30, 60, 350
    highest = max(max(curve) for curve in curves)
    unit = next(each for each in (0.1, 0.2, 0.5, 1.0) if highest / each <= 8)
    x = lambda step: left + step / last * (right - left)
    y = lambda value: bottom - value / highest * (bottom - top)
    picture.text(20, 26, title, bold=True)
    for number in range(int(highest / unit + 1e-6) + 1):
        picture.line(left, y(number * unit), right, y(number * unit), PALE, 1)
        picture.text(left - 8, y(number * unit) + 4, f"{number * unit:.1f}", "end", GREY, 12)
    for step in range(last + 1):
        picture.text(x(step), bottom + 20, str(step), "middle", GREY, 12)
    for row, (curve, (label, color)) in enumerate(zip(curves, labels, strict=True)):
        for step, (one, other) in enumerate(zip(curve, curve[1:], strict=False)):
            picture.line(x(step), y(one), x(step + 1), y(other), color, 2)
        for step, value in enumerate(curve):
            picture.circle(x(step), y(value), 3, color, color)
        picture.line(right - 270, 26 + 20 * row - 4, right - 245, 26 + 20 * row - 4, color, 3)
        picture.text(right - 237, 26 + 20 * row, label)


def draw_granularities() -> Picture:
    """Which steps the tails of each grid and granularity evaluate after SDE step 3 of 16."""
    steps, after = profile("flux_hps_clip").sampling.steps, 3
    rows = [(grid, value) for grid in get_args(Grid) for value in (1, 2, 3)]
    picture = Picture(110 + 30 * len(rows) + 30, f"Tails after SDE step {after} of T = {steps}")
    picture.text(
        20,
        26,
        f"Tails after SDE step {after} of T = {steps}: the calls of the model before the jump to the image",
        bold=True,
    )
    left, wide = 150, WIDTH - 260
    x = lambda step: left + step / steps * wide
    for step in range(steps + 1):
        picture.text(x(step) + 8 * (step == steps), 58, str(step) if step < steps else "image", "middle", GREY, 12)
    for row, (grid, value) in enumerate(rows):
        y = 90.0 + 30 * row + 12 * (row // 3)
        if row % 3 == 0:
            picture.text(20, y + 4, grid, bold=True)
        picture.text(96, y + 4, f"λ = {value}", color=OF_GRANULARITY[value])
        found = tail(steps, after, value, grid)
        picture.line(x(after), y, x(found[0]), y, ORANGE, 4)
        for one, other in zip(found, [*found[1:], float(steps)], strict=True):
            picture.line(x(one), y, x(other), y, OF_GRANULARITY[value])
        for at in found:
            picture.circle(x(at), y, 4.5, OF_GRANULARITY[value], OF_GRANULARITY[value])
        picture.box(x(steps) - 5, y - 5, 11, 11, "#ffffff", OF_GRANULARITY[value])
        picture.text(x(steps) + 24, y + 4, f"{len(found)} calls", color=GREY, size=12)
    return picture


def costs(name: str, entry: str) -> tuple[int, int, int]:
    """Forward evaluations of one prompt: anchor and shared states, members before the tails, tails."""
    tree, group = tree_of(name, entry), profile(name).training.num_generations
    once = sum(1 for node in tree.nodes if not node.splits)
    tails = sum(group for node in tree.nodes if node.splits and node.tail)
    return once, tree.num_forward_evals(group) - once - tails, tails


def draw_cost() -> Picture:
    """Forward evaluations of a prompt by method, on the profile of the paper's setting."""
    found = profile("flux_hps_clip")
    names = [name for name in METHODS if name in found.methods]
    picture = Picture(90 + 46 * len(names), "Forward evaluations a prompt, by method")
    picture.text(20, 26, f"Forward evaluations a prompt, G = {found.training.num_generations}, profile flux_hps_clip", bold=True)
    parts = [("once for the group", INK), ("once per member, before the tail", ORANGE), ("once per member, in tails", BLUE)]
    for number, (words, color) in enumerate(parts):
        picture.box(20 + 230 * number, 40, 12, 12, color, color)
        picture.text(38 + 230 * number, 51, words, size=12)
    highest = max(sum(costs("flux_hps_clip", name)) for name in names)
    for row, name in enumerate(names):
        y, x = 76 + 46 * row, 150.0
        steps = method_and_steps("flux_hps_clip", name)[1]
        picture.text(20, y + 13, LABELS[name])
        picture.text(20, y + 28, f"T = {steps}", color=GREY, size=11)
        for value, (_, color) in zip(costs("flux_hps_clip", name), parts, strict=True):
            width = value / highest * (WIDTH - 220)
            if value:
                picture.box(x, y, width, 22, color, color)
            x += width
        picture.text(x + 8, y + 16, f"{sum(costs('flux_hps_clip', name)):,}")
    return picture


def data_way() -> Iterator[tuple[str, str, str]]:
    """From prompts to the report: what it is, its shape at FLUX's setting, and the folder that makes it."""
    found = profile("flux_hps_clip")
    training, sampling = found.training, found.sampling
    method, steps = method_and_steps("flux_hps_clip", "g2rpo")
    prompts, group = training.prompts_per_iteration, training.num_generations
    branches, tails, rewards = len(method.branches(steps)), len(method.granularities), len(training.rewards)
    tokens = sampling.height // 16 * (sampling.width // 16)
    images = prompts * branches * tails * group
    yield "prompts", f"{found.prompts.train_count:,} training texts, {found.prompts.test_count} test texts, Parquet", "data/"
    yield (
        "embeddings",
        f"T5 [{found.embed.max_sequence_length}, 4096] and CLIP [768] a prompt, {found.embed.dtype}, Parquet",
        "data/, stages/embed.py",
    )
    yield (
        "rollout tree",
        f"{tree_of('flux_hps_clip', 'g2rpo').num_forward_evals(group):,} calls a prompt; latents [N, {tokens}, 64]",
        "rollout/, sampling/, models/",
    )
    yield (
        "images",
        f"[N, 3, {sampling.height}, {sampling.width}] in [0, 1]; P·B·J·G = {prompts}·{branches}·{tails}·{group} = {images:,} an iteration",
        "models/",
    )
    yield "rewards", f"float32 [R, P, B, J, G] = [{rewards}, {prompts}, {branches}, {tails}, {group}]", "rewards/"
    yield (
        "advantages",
        f"float32 [P, B, G] = [{prompts}, {branches}, {group}], in ±{training.adv_clip_max:g}",
        "algorithm/advantage.py",
    )
    yield "update", "clipped loss of N states with M next states each", "training/, algorithm/loss.py"
    yield "checkpoint", "weights, optimizer, records: resumes bit for bit; then runs/", "distributed/, training/loop.py"
    yield (
        "evaluation",
        f"[{found.prompts.test_count}, 3, {found.evaluation.height}, {found.evaluation.width}] and a row a prompt and reward, Parquet",
        "evaluation/",
    )
    yield "report", "one HTML file, Markdown, JSON, SVG", "reporting/"


def draw_architecture() -> Picture:
    """How data flows, with shapes and folders."""
    rows = list(data_way())
    picture = Picture(66 + 62 * len(rows), "How data flows from prompts to the report")
    picture.text(20, 28, "what", color=GREY, size=12)
    picture.text(210, 28, "shape, for G²RPO with profile flux_hps_clip", color=GREY, size=12)
    picture.text(WIDTH - 20, 28, "in g2rpo_core/", "end", GREEN, 12)
    loop = range(2, 7)
    top = lambda row: 42 + 62 * row
    picture.box(6, top(loop[0]) - 8, WIDTH - 12, 62 * len(loop) - 4, "#f4f7fc", PALE)
    picture.text(WIDTH - 20, top(loop[-1]) + 46, "one iteration of training", "end", BLUE, 11)
    for row, (name, shape, folder) in enumerate(rows):
        picture.box(20, top(row), 150, 36, "#ffffff", BLUE if row in loop else INK)
        picture.text(95, top(row) + 23, name, "middle", bold=True)
        picture.text(190, top(row) + 15, shape, size=12)
        picture.text(190, top(row) + 32, folder, color=GREEN, size=12)
        if row:
            picture.arrow(95, top(row - 1) + 36, 95, top(row), GREY)
    return picture


PICTURES = {
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
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw().svg())
        print(folder / name)


if __name__ == "__main__":
    main()
