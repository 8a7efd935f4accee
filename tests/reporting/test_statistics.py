import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from g2rpo_core.reporting.render import formatted
from g2rpo_core.reporting.statistics import (
    holm,
    paired_difference,
    pooled_half_width,
    sign_flip,
    student,
)


def test_the_interval_of_many_prompts_is_nearly_a_normals():
    gaps = np.random.default_rng(0).normal(0.1, 1, 1000)
    found = paired_difference(gaps, np.zeros(1000))
    expected = stats.norm.interval(0.95, gaps.mean(), stats.sem(gaps))
    assert (found["low"], found["high"]) == pytest.approx(expected, abs=0.004)


def test_one_pair_has_a_difference_and_no_interval():
    gap = paired_difference(np.array([1.0, math.nan]), np.array([0.25, 0.0]))
    assert (gap["difference"], gap["pairs"]) == (0.75, 1) and math.isnan(gap["low"])


def test_ties_count_half():
    assert paired_difference(np.array([1.0, 0.0, -1.0, 0.0]), np.zeros(4))["win_rate"] == 0.5


def test_sign_flips_are_counted_exactly():
    by_hand = [sum(v if bit >> i & 1 else -v for i, v in enumerate([1, 2, -4])) for bit in range(8)]
    assert sign_flip([1, 2, -4]) == pytest.approx(sum(abs(total) >= 1 for total in by_hand) / 8)


def test_sign_flips_of_many_values_are_drawn():
    """2^40 sign flips: drawn ones stay, and agree with a normal of variance 20 (1.5^2 + 0.5^2)."""
    values = [0.5 + (-1) ** number for number in range(40)]
    assert (
        sign_flip(values)
        == sign_flip(values)
        == pytest.approx(2 * stats.norm.sf(20 / 50**0.5), rel=0.15)
    )


def test_holm_steps_down_and_never_exceeds_bonferroni():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.5]) == pytest.approx([1.0, 1.0]) and holm([]) == []


def test_one_variance_for_all_is_the_mean_of_those_of_pairs_with_more_degrees_of_freedom():
    values = np.random.default_rng(0).normal(size=(3, 5))
    variance = np.mean([np.var(one - other, ddof=1) for one, other in combinations(values, 2)])
    expected = stats.t.ppf(0.975, 2 * 4) * (variance / 5) ** 0.5
    assert pooled_half_width(values) == pytest.approx(expected)


def test_gaps_without_a_spread_have_a_p_and_what_is_not_known_is_a_dash():
    for beyond, side in ((0.0, "two-sided"), (-0.1, "two-sided"), (0.2, "less")):
        assert student([beyond] * 3, beyond, side) == sign_flip([beyond] * 3, beyond, side) == 1
    assert formatted("%.2g, %.2g", math.nan, 0.5) == "–"
