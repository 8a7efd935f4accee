"""Formulas of docs/explanation/granularities.md, against Monte Carlo and what was measured."""

import re

import numpy as np
import pandas as pd
import pytest

from g2rpo_core.algorithm.methods import METHODS
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "explanation" / "granularities.md").read_text()


def ess(kappa, correlations) -> float:
    """The page's formula."""
    return float(np.sum(kappa) ** 2 / np.sum(correlations))


def evaluations(granularities, steps, sde_steps) -> int:
    tree = {"sde_steps": tuple(range(sde_steps)), "granularities": granularities}
    return METHODS["g2rpo"].changed(tree=tree).tree.build(steps).num_forward_evals(12)


def bound(each, steps, sde_steps) -> float:
    """The mean correlation below which a sum can pay at equal evaluations."""
    together = evaluations(each, steps, sde_steps)
    return (sum(evaluations((one,), steps, sde_steps) for one in each) / together - 1) / (
        len(each) - 1
    )


def simulated(kappa, correlations, groups=8000, members=12, dimensions=200) -> float:
    """Squared signal-to-noise of a group's gradient, relative to that of the quality itself."""
    rng = np.random.default_rng(0)
    count = len(kappa)
    joint = np.block([[np.ones((1, 1)), np.array([kappa])], [np.array([kappa]).T, correlations]])
    draw = np.linalg.cholesky(joint + 1e-12 * np.eye(count + 1))
    quality = np.zeros(dimensions)
    quality[0] = 1.0  # the direction that quality follows
    found = []
    for rewards in (slice(0, 1), slice(1, None)):
        noise = rng.standard_normal((groups, members, dimensions))
        rest = rng.standard_normal((groups, members, count))
        values = np.concatenate([noise @ quality[:, None], rest], -1) @ draw.T
        scaled = (values - values.mean(1, keepdims=True)) / values.std(1, ddof=1, keepdims=True)
        advantages = scaled[..., rewards].sum(-1)
        gradients = np.einsum("gm,gmd->gd", advantages, noise) / members
        found.append(gradients[:, 0].mean() ** 2 / gradients[:, 1:].var())
    return found[1] / found[0]


@pytest.mark.parametrize(
    "kappa, r", [((1.0, 0.84), 0.84), ((0.7, 0.7, 0.7), 0.5), ((0.8, 0.6), 0.3)]
)
def test_the_effective_sample_size_is_that_of_simulated_groups(kappa, r):
    correlations = np.full((len(kappa), len(kappa)), r) + (1 - r) * np.eye(len(kappa))
    assert simulated(kappa, correlations) == pytest.approx(ess(kappa, correlations), rel=0.08)


def test_numbers_of_the_page_follow_from_its_formulas():
    assert f"{3 / (1 + 2 * 0.90):.2f}" == "1.07" and "three are worth 1.07 of one" in PAGE
    measured = np.array(
        [[1, 0.97, 0.85], [0.97, 1, 0.90], [0.85, 0.90, 1]]
    )  # of λ = 1, 2 and 3; the last is assumed
    assert f"{ess(measured[0], measured):.2f}" == "0.94" and "they are worth 0.94" in PAGE
    ratio = evaluations((1, 2, 3), 10, 5) / evaluations((1,), 10, 5)
    assert f"{ratio:.2f} times the forward evaluations at T = 10" in " ".join(PAGE.split())
    pairs = [f"{bound((1, 3), *world):.2f}" for world in ((10, 5), (16, 8))]
    threes = [f"{bound((1, 2, 3), *world):.2f}" for world in ((10, 5), (16, 8))]
    assert (
        f"that bound is {pairs[0]} with T = 10 and steps 0–4, and {pairs[1]} with T = 16"
        in " ".join(PAGE.split())
    )
    assert f"{threes[0]} and {threes[1]}." in PAGE


@pytest.mark.parametrize("study, world", [("granularities", (10, 5)), ("marks_choices", (16, 8))])
def test_measured_correlations_are_those_of_the_page_and_beyond_the_bound(study, world):
    table = pd.read_parquet(ROOT / "studies" / study / "results.parquet")
    last = table[table.part == "training"].groupby(["method", "seed"]).last()
    measured = last.filter(regex=r"^correlation_.*_3$").stack()
    name = "tiny_marks" if study.startswith("marks") else "tiny"
    low, high = map(
        float, re.search(rf"\| `{name}`, T = \d+ \| ([\d.]+) to ([\d.]+) ", PAGE).groups()
    )
    assert low - 0.005 <= measured.min() and measured.max() <= high + 0.005
    assert measured.min() > bound((1, 3), *world)


def test_a_sum_of_two_pays_only_below_its_bound():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        fine, coarse = sorted(rng.uniform(10, 100, 2), reverse=True)
        together, r = rng.uniform(fine, fine + coarse), rng.uniform(-0.5, 1)
        kappa = rng.uniform(0, 1, 2)
        best = max(kappa[0] ** 2 / fine, kappa[1] ** 2 / coarse)
        of_sum = ess(kappa, np.array([[1, r], [r, 1]])) / together
        assert of_sum <= best * ((fine + coarse) / together) / (1 + r) * (1 + 1e-9)
        assert of_sum <= best * (1 + 1e-9) or r < (fine + coarse) / together - 1
