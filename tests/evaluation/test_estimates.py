"""Estimates over seeds against definitions written out."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from proxreplay.errors import InputError
from proxreplay.evaluation import estimate, paired_difference

values = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=8)
# Ties are exact or none: what counts as nearly equal is scipy's choice.
decimals = st.lists(st.integers(-1000, 1000).map(lambda v: v / 1000), min_size=2, max_size=8)


def test_estimates_over_seeds() -> None:
    numbers = np.array([0.2, 0.4, 0.9])
    result = estimate(numbers)
    assert result.mean == pytest.approx(0.5)
    spread = math.sqrt(sum((v - 0.5) ** 2 for v in numbers) / 2)
    assert result.standard_error == pytest.approx(spread / math.sqrt(3))
    assert math.isnan(estimate(numbers[:1]).standard_error)


@settings(deadline=None, max_examples=50)
@given(decimals)
@example([0.0, 0.0, 0.0, 0.0, 0.0, -0.31, -0.687, 0.998])  # their mean is nearly 0, and so are ties
def test_the_p_value_is_the_share_of_sign_patterns_as_extreme(differences: list[float]) -> None:
    observed = abs(sum(differences))
    slack = 1e-12 * sum(abs(d) for d in differences)
    patterns = list(itertools.product([-1, 1], repeat=len(differences)))
    extreme = sum(
        abs(sum(s * d for s, d in zip(pattern, differences, strict=True))) >= observed - slack
        for pattern in patterns
    )
    result = paired_difference(np.zeros(len(differences)), np.array(differences))
    assert result.p_value == pytest.approx(extreme / len(patterns))


@pytest.mark.parametrize("seeds", [5, 6])
def test_the_interval_is_that_of_every_resample(seeds: int) -> None:
    """BCa written out over all n^n resamples, against the 100,000 that are drawn."""
    d = np.arange(seeds) ** 4.0  # skewed, so that both corrections matter
    means = np.array([np.mean(s) for s in itertools.product(d, repeat=seeds)])
    below = np.mean(means < d.mean()) + np.mean(means == d.mean()) / 2
    z0 = stats.norm.ppf(below)
    a = ((d - d.mean()) ** 3).sum() / (6 * ((d - d.mean()) ** 2).sum() ** 1.5)
    z = z0 + stats.norm.ppf([0.025, 0.975])
    low, high = np.quantile(means, stats.norm.cdf(z0 + z / (1 - a * z)))
    ours = paired_difference(np.zeros(seeds), d, resamples=100_000)
    assert ours.low == pytest.approx(low, abs=0.03 * (high - low))
    assert ours.high == pytest.approx(high, abs=0.03 * (high - low))


@settings(deadline=None, max_examples=50)
@given(values)
def test_the_interval_lies_among_the_differences_and_turns_with_the_order(
    differences: list[float],
) -> None:
    d = np.array(differences)
    forward, back = (paired_difference(*pair) for pair in ((0 * d, d), (d, 0 * d)))
    assert d.min() - 1e-9 <= forward.low <= forward.high <= d.max() + 1e-9
    assert forward.mean == pytest.approx(-back.mean)
    assert forward.low == pytest.approx(-back.high, abs=1e-3)  # up to ties among the means


def test_the_same_seeds_give_the_same_interval() -> None:
    first, second = np.random.default_rng(0).random((2, 20))
    assert paired_difference(first, second) == paired_difference(first, second)


def test_one_seed_has_no_interval_and_equal_differences_a_point() -> None:
    alone = paired_difference(np.array([0.1]), np.array([0.3]))
    assert alone.mean == pytest.approx(0.2)
    assert math.isnan(alone.low)
    equal = paired_difference(np.zeros(3), np.full(3, 0.25))
    assert (equal.low, equal.high, equal.p_value) == (0.25, 0.25, 0.25)


def test_seeds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(InputError, match="one value per seed"):
        paired_difference(np.zeros(3), np.zeros(4))
    with pytest.raises(InputError, match="confidence=95"):
        paired_difference(np.zeros(3), np.ones(3), confidence=95)
