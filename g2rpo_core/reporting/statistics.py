"""Differences with intervals, by scipy: bootstrap over prompts, t and sign flips over seeds."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from g2rpo_core.sampling.seeding import seed_of

RESAMPLES = 10_000
CONFIDENCE = 0.95


def paired_difference(treated: np.ndarray, control: np.ndarray, name: str = "") -> dict[str, float]:
    """Compute the mean of treated - control over pairs [N] with its 95 % bootstrap interval (BCa).

    name: seeds the resampling. Pairs in which either value is missing (NaN) are left out. Returns
    columns of the table of comparisons: difference, low, high, standard_error, win_rate (the share
    of pairs with a positive difference; ties count half) and pairs. Of fewer than two pairs, all
    but the difference and their number is NaN.
    """
    gaps = np.asarray(treated, float) - np.asarray(control, float)
    gaps = gaps[~np.isnan(gaps)]
    if len(gaps) < 2:
        mean = float(gaps[0]) if len(gaps) else math.nan
        unknown = dict.fromkeys(("low", "high", "standard_error", "win_rate"), math.nan)
        return {"difference": mean, **unknown, "pairs": len(gaps)}
    mean = float(gaps.mean())
    low = high = mean
    # If all differences are equal, so are all resamples, and BCa is undefined
    if np.ptp(gaps) > 1e-9 * np.abs(gaps).max():
        options = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "BCa"}
        rng = np.random.default_rng(seed_of("bootstrap", name))
        result = stats.bootstrap((gaps,), np.mean, **options, rng=rng)
        low, high = map(float, result.confidence_interval)
    return {
        "difference": mean,
        "low": low,
        "high": high,
        "standard_error": float(stats.sem(gaps)),
        "win_rate": float(((gaps > 0) + 0.5 * (gaps == 0)).mean()),
        "pairs": len(gaps),
    }


def spread(
    values: Sequence[float], confidence: float = CONFIDENCE, fewest: int = 2
) -> dict[str, float]:
    """Compute the mean over seeds with Student's t interval: columns difference, low and high.

    The interval is NaN for less than `fewest` values, which is at least two; confidence: in [0, 1].
    """
    mean = float(np.mean(values)) if len(values) else math.nan
    if len(values) < fewest:
        return {"difference": mean, "low": math.nan, "high": math.nan}
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values))
    return {"difference": mean, "low": mean - half, "high": mean + half}


def sign_flip(values: Sequence[float], beyond: float = 0.0, side: str = "two-sided") -> float:
    """Return the p-value of the mean being `beyond`, by sign flips of the distances.

    Exact for up to 16 values; with more, over as many flips as 16 have, drawn with a fixed seed.
    side: as scipy's `alternative`.
    """
    data, every = (np.asarray(values, float) - beyond,), 2**16
    drawn = {"n_resamples": every - 1, "rng": 0} if len(values) > 16 else {"n_resamples": np.inf}
    how = {"permutation_type": "samples", "alternative": side}
    return float(stats.permutation_test(data, np.mean, **how, **drawn).pvalue)


def student(values: Sequence[float], beyond: float = 0.0, side: str = "two-sided") -> float:
    """Return the p-value of Student's t of the mean being `beyond`; side: as in `sign_flip`.

    If every value is `beyond`, t is 0 / 0, for which scipy gives NaN: p is 1, as by sign flips.
    """
    if np.allclose(values, beyond, rtol=1e-9, atol=0):
        return 1.0
    return float(stats.ttest_1samp(values, beyond, alternative=side).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that hold together, by Holm: at most as large as Bonferroni's."""
    order = np.argsort(p_values)
    stepped = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1)
    return adjusted.tolist()


def pooled_half_width(values: np.ndarray, confidence: float = CONFIDENCE) -> float:
    """Return half of the interval of a difference of two rows' means, with one pooled variance.

    values: [k, n], k >= 2 methods at the same n >= 2 seeds. The variance is what neither method nor
    seed explains, with (k - 1)(n - 1) degrees of freedom.
    """
    methods, seeds = values.shape
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    freedom = (methods - 1) * (seeds - 1)
    return float(
        stats.t.ppf((1 + confidence) / 2, freedom) * np.sqrt(2 * (rest**2).sum() / freedom / seeds)
    )
