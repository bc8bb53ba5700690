"""Numbers over seeds: mean, standard error, and paired differences with an interval."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from proxreplay.errors import InputError
from proxreplay.evaluation.trajectory import Array

EXACT_SIGNS = 14  # up to this many seeds, every sign pattern (2^n) is enumerated


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error ``std(ddof=1) / sqrt(n)`` (NaN for one seed)."""

    mean: float
    standard_error: float
    seeds: int


def estimate(values: Array) -> Estimate:
    """Mean and standard error over seeds.

    >>> estimate(np.array([1.0, 2.0, 3.0]))
    Estimate(mean=2.0, standard_error=0.5773502691896258, seeds=3)
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    error = float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return Estimate(float(values.mean()), error, n)


@dataclass(frozen=True)
class PairedDifference:
    """Second minus first, seed by seed."""

    mean: float  # over seeds
    standard_error: float  # of the mean (NaN for one seed)
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    # of the two-sided sign-flip test that the difference is symmetric around 0; with n seeds it
    # cannot be below 2 / 2^n
    p_value: float
    seeds: int  # how many pairs
    least: float  # the smallest of the single differences
    most: float  # the largest of them


def paired_difference(
    first: Array, second: Array, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedDifference:
    """Second minus first with a BCa bootstrap interval and a sign-flip p-value, both by scipy.

    Deterministic for the same seed; up to 14 pairs every sign pattern is enumerated. A bootstrap
    over very few seeds is narrower than it should be: below five, read the single differences.

    Args:
        first: ``[n]``, one value per seed.
        second: ``[n]``, in the same order of seeds.
        confidence: of the interval.
        resamples: drawn for the interval, and for the test where not every pattern is enumerated.
        seed: of the generator that draws them.
    """
    first, second = (np.asarray(v, dtype=np.float64) for v in (first, second))
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise InputError(
            f"paired_difference: shapes {first.shape} and {second.shape}; give one value per seed "
            "for both, in the same order."
        )
    if not 0 < confidence < 1:
        raise InputError(f"paired_difference: confidence={confidence}; give a number in (0, 1).")
    differences = second - first
    centre = estimate(differences)
    low, high = _interval(differences, confidence, resamples, np.random.default_rng(seed))
    return PairedDifference(
        mean=centre.mean,
        standard_error=centre.standard_error,
        low=low,
        high=high,
        p_value=_sign_flip_p(differences, resamples, np.random.default_rng(seed)),
        seeds=len(differences),
        least=float(differences.min()),
        most=float(differences.max()),
    )


def _interval(
    values: Array, confidence: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Efron's bias-corrected and accelerated bootstrap interval of the mean."""
    from scipy import stats

    mean = float(values.mean())
    if len(values) < 2:
        return float("nan"), float("nan")
    scale = float(np.abs(values).max())
    if np.ptp(values) <= 1e-12 * scale:  # one point; scipy has no interval for it
        return mean, mean
    found = stats.bootstrap(
        (values / scale,), np.mean, n_resamples=resamples, confidence_level=confidence, rng=rng
    ).confidence_interval
    return float(scale * found.low), float(scale * found.high)


def _sign_flip_p(values: Array, resamples: int, rng: np.random.Generator) -> float:
    """The share of sign patterns whose absolute mean is at least the observed one."""
    from scipy import stats

    if len(values) < 2:  # both patterns are as extreme; scipy wants two values
        return 1.0
    drawn = max(resamples, 2**EXACT_SIGNS)
    scale = np.abs(values).max() or 1.0

    def rounded_mean(flipped: Array, axis: int = -1) -> Any:
        return np.round(np.mean(flipped, axis=axis), 12)  # finer is rounding, and hides ties

    found = stats.permutation_test(
        (values / scale,), rounded_mean, permutation_type="samples", n_resamples=drawn, rng=rng
    )
    return float(found.pvalue)
