"""Paired comparisons over prompts: mean differences, bootstrap intervals, win rates."""

from dataclasses import dataclass

import numpy as np

from g2rpo_core.common.seeding import seed_of

RESAMPLES = 10_000
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t for 1, 2, ... degrees of freedom


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, its 95 % bootstrap interval, standard error, and share of pairs won (ties half)."""

    mean: float
    low: float
    high: float
    standard_error: float
    win_rate: float
    pairs: int

    @property
    def standard_errors(self) -> float:
        """The mean in units of its standard error; 0 if every pair is equal."""
        return self.mean / self.standard_error if self.standard_error else 0.0


def paired_difference(treated: np.ndarray, control: np.ndarray, name: str = "") -> Difference:
    """treated - control over pairs [N], N >= 2, by the percentile bootstrap over pairs; `name` seeds the resampling.

    Pairs in which either value is missing (NaN) are left out. ValueError if fewer than two are left.
    """
    difference = np.asarray(treated, float) - np.asarray(control, float)
    difference = difference[~np.isnan(difference)]
    if len(difference) < 2:
        raise ValueError(f"need at least two pairs, got {len(difference)}")
    rng = np.random.default_rng(seed_of("bootstrap", name))
    means = difference[rng.integers(len(difference), size=(RESAMPLES, len(difference)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Difference(
        mean=float(difference.mean()),
        low=float(low),
        high=float(high),
        standard_error=float(difference.std(ddof=1) / np.sqrt(len(difference))),
        win_rate=float(((difference > 0) + 0.5 * (difference == 0)).mean()),
        pairs=len(difference),
    )


@dataclass(frozen=True)
class Spread:
    """Values of several seeds in rising order, their mean, and its 95 % interval by Student's t."""

    values: tuple[float, ...]
    mean: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Two values or more; above ten the interval is that of nine degrees of freedom, a little too wide."""
    mean, half = (
        float(np.mean(values)),
        T_975[min(len(values) - 1, len(T_975)) - 1] * float(np.std(values, ddof=1)) / len(values) ** 0.5,
    )
    return Spread(tuple(sorted(values)), mean, mean - half, mean + half)
