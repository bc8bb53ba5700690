"""Numbers over seeds: mean, standard error, and paired differences with an interval."""

import itertools
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from proxreplay.errors import InputError
from proxreplay.evaluation.metrics import Array

# Up to this many seeds, every resample (n^n) and every sign pattern (2^n) is enumerated.
EXACT_RESAMPLES = 6
EXACT_SIGNS = 14


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
    """Second minus first, seed by seed.

    Args:
        mean: over seeds.
        standard_error: of the mean (NaN for one seed).
        low: lower end of the interval.
        high: upper end of the interval.
        p_value: of the two-sided sign-flip test that the difference is symmetric around 0; with n
            seeds it cannot be below ``2 / 2^n``.
        seeds: how many pairs.
        least: the smallest of the single differences.
        most: the largest of them.
    """

    mean: float
    standard_error: float
    low: float
    high: float
    p_value: float
    seeds: int
    least: float
    most: float


def paired_difference(
    first: Array,
    second: Array,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Second minus first with a BCa bootstrap interval and a sign-flip p-value.

    Deterministic: every resample is enumerated up to 6 seeds, every sign pattern up to 14; beyond
    that a generator of its own draws ``resamples`` of them. A bootstrap over very few seeds is
    narrower than it should be: below five, read the single differences.

    Args:
        first: ``[n]``, one value a seed.
        second: ``[n]``, in the same order of seeds.
        confidence: of the interval.
        resamples: drawn where not all are enumerated.
        seed: of the generator that draws them.
    """
    first, second = (np.asarray(v, dtype=np.float64) for v in (first, second))
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise InputError(
            f"paired_difference: shapes {first.shape} and {second.shape}; give one value a seed "
            "for both, in the same order."
        )
    if not 0 < confidence < 1:
        raise InputError(f"paired_difference: confidence={confidence}; give a number in (0, 1).")
    differences = second - first
    centre = estimate(differences)
    rng = np.random.default_rng(seed)
    low, high = _bca_interval(differences, confidence, resamples, rng)
    p = _sign_flip_p(differences, resamples, rng)
    return PairedDifference(
        mean=centre.mean,
        standard_error=centre.standard_error,
        low=low,
        high=high,
        p_value=p,
        seeds=len(differences),
        least=float(differences.min()),
        most=float(differences.max()),
    )


def _resampled_means(values: Array, resamples: int, rng: np.random.Generator) -> Array:
    n = len(values)
    if n <= EXACT_RESAMPLES:
        choices = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        choices = rng.integers(0, n, size=(resamples, n))
    means: Array = values[choices].mean(axis=1)
    return means


def _bca_interval(
    values: Array, confidence: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Efron's bias-corrected and accelerated bootstrap interval of the mean.

    With ``z0`` the normal quantile of the share of resampled means below the mean (ties count
    half) and ``a`` the acceleration from the jackknife, the ends are the resampled means' quantiles
    ``Phi(z0 + (z0 + z) / (1 - a (z0 + z)))`` at ``z = Phi^-1((1 -+ confidence) / 2)``.
    """
    n, mean = len(values), float(values.mean())
    if n < 2:
        return float("nan"), float("nan")
    scale = float(np.abs(values).max())
    if np.ptp(values) <= 1e-12 * scale:
        return mean, mean
    means = _resampled_means(values, resamples, rng)
    tied = np.isclose(means, mean, rtol=0.0, atol=1e-12 * scale)
    below = float(np.mean((means < mean) & ~tied) + tied.mean() / 2)
    normal = NormalDist()
    z0 = normal.inv_cdf(below)
    influence = (values - mean) / np.ptp(values)  # the jackknife's, up to a factor that cancels
    a = float((influence**3).sum() / (6 * (influence**2).sum() ** 1.5))
    ends = []
    for tail in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = z0 + normal.inv_cdf(tail)
        ends.append(normal.cdf(z0 + z / (1 - a * z)))
    low, high = np.quantile(means, ends)
    return float(low), float(high)


def _sign_flip_p(values: Array, resamples: int, rng: np.random.Generator) -> float:
    """The share of sign patterns whose absolute mean is at least the observed one."""
    n = len(values)
    if n <= EXACT_SIGNS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=n)))
    else:
        drawn = rng.choice([-1.0, 1.0], size=(resamples, n))
        signs = np.concatenate([np.ones((1, n)), drawn])  # the observed pattern is one of them
    sums = np.abs(signs @ values)
    observed = abs(float(values.sum()))
    tolerance = 1e-12 * float(np.abs(values).sum())
    return float(np.mean(sums >= observed - tolerance))
