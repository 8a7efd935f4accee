import math

import numpy as np
import pytest
from scipy import stats

from g2rpo_core.reporting.statistics import (
    holm,
    paired_difference,
    pooled_half_width,
    sign_flip,
    spread,
    student,
)


def test_a_constant_difference_has_no_interval():
    control = np.arange(10.0)
    gap = paired_difference(control + 2, control)
    assert (gap["difference"], gap["low"], gap["high"], gap["win_rate"]) == (2, 2, 2, 1)


def test_intervals_cover_the_truth_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        gap = paired_difference(rng.exponential(1.0, 60) - 1, np.zeros(60), str(trial))
        covered += gap["low"] <= 0 <= gap["high"]
    assert 0.89 <= covered / 200 <= 0.99


def test_one_pair_has_a_difference_and_no_interval():
    gap = paired_difference(np.array([1.0, math.nan]), np.array([0.25, 0.0]))
    assert (gap["difference"], gap["pairs"]) == (0.75, 1) and math.isnan(gap["low"])


def test_ties_count_half():
    assert paired_difference(np.array([1.0, 0.0, -1.0, 0.0]), np.zeros(4))["win_rate"] == 0.5


def test_the_interval_over_seeds_is_students():
    values = [1.0, 2.5, 1.75, 3.0]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    found = spread(values)
    assert (found["low"], found["high"]) == pytest.approx(expected)


def test_the_interval_of_fewer_values_than_asked_is_not_known():
    assert spread([1.0, 2.0], fewest=3)["difference"] == 1.5
    assert math.isnan(spread([1.0, 2.0], fewest=3)["low"]) and spread([1.0, 2.0])["low"] < 1.5


def test_sign_flips_are_counted_exactly():
    values = [
        0.3,
        0.1,
        0.2,
        0.4,
        0.25,
        0.15,
        0.35,
        0.05,
    ]  # all above zero: only all signs flipped is as far away
    assert sign_flip(values) == pytest.approx(2 / 2**8)
    assert sign_flip(values, beyond=0.2) > 0.5 and student(values) < 0.01 < student(
        values, beyond=0.2
    )
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


def test_one_variance_for_all_is_an_anovas_and_covers_the_truth():
    """Two methods: the paired t-test. Many, of three seeds: each interval covers a true zero."""
    rng = np.random.default_rng(0)
    two = rng.normal(size=(2, 5))
    low, high = stats.ttest_rel(two[0], two[1]).confidence_interval()
    assert pooled_half_width(two) == pytest.approx((high - low) / 2)
    covered = 0
    for _ in range(400):
        values = rng.normal(size=(10, 3)) + rng.normal(size=3)
        covered += abs(values[0].mean() - values[1].mean()) < pooled_half_width(values)
    assert covered / 400 == pytest.approx(0.95, abs=0.025)
