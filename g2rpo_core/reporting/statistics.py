"""Computes differences with intervals, by scipy: paired over prompts (bootstrap), and over seeds (Student's t, sign flips)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import stats

from g2rpo_core.sampling.seeding import seed_of

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its 95 % bootstrap interval, from `low` to `high`: NaN where there are fewer than two pairs."""

    mean: float
    low: float
    high: float
    standard_error: float
    win_rate: float
    """Share of pairs with a positive difference; ties count half."""
    pairs: int

    @property
    def known(self) -> bool:
        """Say whether there is an interval, which two pairs need."""
        return not math.isnan(self.low)

    @property
    def standard_errors(self) -> float:
        """Return the mean in units of its standard error; 0 if every pair is equal, NaN if there is no interval."""
        return self.mean / self.standard_error if self.standard_error else 0.0


def paired_difference(treated: np.ndarray, control: np.ndarray, name: str = "") -> Difference:
    """Compute treated - control over pairs [N], N >= 2, by the bootstrap over pairs (BCa); `name` seeds the resampling.

    Pairs in which either value is missing (NaN) are left out. ValueError if fewer than two are left.
    """
    difference = np.asarray(treated, float) - np.asarray(control, float)
    difference = difference[~np.isnan(difference)]
    if len(difference) < 2:
        raise ValueError(f"need at least two pairs, got {len(difference)}")
    mean = float(difference.mean())
    low = high = mean
    # If all differences are equal, so are all resamples, and BCa is undefined
    if np.ptp(difference) > 1e-9 * np.abs(difference).max():
        options = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "BCa"}
        result = stats.bootstrap((difference,), np.mean, **options, rng=np.random.default_rng(seed_of("bootstrap", name)))
        low, high = map(float, result.confidence_interval)
    return Difference(
        mean=mean,
        low=low,
        high=high,
        standard_error=float(stats.sem(difference)),
        win_rate=float(((difference > 0) + 0.5 * (difference == 0)).mean()),
        pairs=len(difference),
    )


def compared(treated: np.ndarray, control: np.ndarray, name: str = "") -> Difference:
    """Compute what `paired_difference` does; of fewer than two pairs, the mean alone (NaN of none), with NaN for its interval."""
    difference = np.asarray(treated, float) - np.asarray(control, float)
    difference = difference[~np.isnan(difference)]
    if len(difference) > 1:
        return paired_difference(treated, control, name)
    nan = math.nan
    return Difference(float(difference[0]) if len(difference) else nan, nan, nan, nan, nan, len(difference))


@dataclass(frozen=True)
class Spread:
    """The mean over seeds with its interval by Student's t, from `low` to `high`; of 95 % unless `spread` is called otherwise."""

    values: tuple[float, ...]
    """In rising order."""
    mean: float
    low: float
    high: float
    known: ClassVar[bool] = True
    """There is an interval, as of a `Difference` there may not be."""


def sign_flip(values: Sequence[float], beyond: float = 0.0) -> float:
    """Return the p-value, two-sided, of the mean being `beyond`: over all sign flips of the values' distances from it.

    Exact for up to 16 values; with more, over as many flips as 16 have, drawn with a fixed seed.
    """
    data, every = (np.asarray(values, float) - beyond,), 2**16
    drawn = {"n_resamples": every - 1, "rng": 0} if len(values) > 16 else {"n_resamples": np.inf}
    return float(stats.permutation_test(data, np.mean, permutation_type="samples", **drawn).pvalue)


def student(values: Sequence[float], beyond: float = 0.0) -> float:
    """Return the p-value of Student's t, two-sided, of the mean being `beyond`."""
    return float(stats.ttest_1samp(values, beyond).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that hold together, by Holm: at most as large as Bonferroni's."""
    order = np.argsort(p_values)
    stepped = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1)
    return adjusted.tolist()


def pooled_half_width(values: np.ndarray, confidence: float = CONFIDENCE) -> float:
    """Return half of the interval of a difference of two rows' means, with one variance for all rows.

    values: [k, n], k >= 2 methods at the same n >= 2 seeds. The variance is what neither method nor seed explains, with
    (k - 1)(n - 1) degrees of freedom.
    """
    methods, seeds = values.shape
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    freedom = (methods - 1) * (seeds - 1)
    return float(stats.t.ppf((1 + confidence) / 2, freedom) * np.sqrt(2 * (rest**2).sum() / freedom / seeds))


def spread(values: list[float], confidence: float = CONFIDENCE) -> Spread:
    """Return the spread of two values or more; confidence: of the interval, in [0, 1]."""
    mean = float(np.mean(values))
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values))
    return Spread(tuple(sorted(values)), mean, mean - half, mean + half)
