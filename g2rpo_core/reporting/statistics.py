"""Computes differences with intervals, by scipy: paired over prompts (bootstrap), and over seeds (Student's t)."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from g2rpo_core.common.seeding import seed_of

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its 95 % bootstrap interval, from `low` to `high`."""

    mean: float
    low: float
    high: float
    standard_error: float
    win_rate: float
    """Share of pairs with a positive difference; ties count half."""
    pairs: int

    @property
    def standard_errors(self) -> float:
        """Return the mean in units of its standard error; 0 if every pair is equal."""
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


@dataclass(frozen=True)
class Spread:
    """The mean over seeds with its interval by Student's t, from `low` to `high`; of 95 % unless `spread` is called otherwise."""

    values: tuple[float, ...]
    """In rising order."""
    mean: float
    low: float
    high: float


def spread(values: list[float], confidence: float = CONFIDENCE) -> Spread:
    """Return the spread of two values or more; confidence: of the interval, in [0, 1]."""
    mean = float(np.mean(values))
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values))
    return Spread(tuple(sorted(values)), mean, mean - half, mean + half)
