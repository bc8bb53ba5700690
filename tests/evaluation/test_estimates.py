"""Estimates over seeds against definitions written out, and against scipy where it has them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from proxreplay.errors import InputError
from proxreplay.evaluation import estimate, paired_difference

values = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=8)


def test_estimates_over_seeds() -> None:
    numbers = np.array([0.2, 0.4, 0.9])
    result = estimate(numbers)
    assert result.mean == pytest.approx(0.5)
    spread = math.sqrt(sum((v - 0.5) ** 2 for v in numbers) / 2)
    assert result.standard_error == pytest.approx(spread / math.sqrt(3))
    assert math.isnan(estimate(numbers[:1]).standard_error)


@settings(deadline=None, max_examples=50)
@given(values)
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


@pytest.mark.parametrize("seeds", [5, 10], ids=["enumerated", "drawn"])
def test_the_interval_agrees_with_scipys_bca(seeds: int) -> None:
    differences = np.arange(seeds) ** 4.0  # skewed, so that both corrections matter
    ours = paired_difference(np.zeros(seeds), differences, resamples=100_000)
    theirs = stats.bootstrap(
        (differences,), np.mean, n_resamples=100_000, method="BCa", rng=np.random.default_rng(2)
    ).confidence_interval
    width = ours.high - ours.low
    assert ours.low == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.03 * width)


@settings(deadline=None, max_examples=50)
@given(values)
def test_the_interval_lies_among_the_differences_and_turns_with_the_order(
    differences: list[float],
) -> None:
    d = np.array(differences)
    forward, back = (paired_difference(*pair) for pair in ((0 * d, d), (d, 0 * d)))
    assert d.min() - 1e-9 <= forward.low <= forward.high <= d.max() + 1e-9
    assert forward.mean == pytest.approx(-back.mean)
    if len(d) <= 6:  # enumerated: mirrored up to the quantiles' interpolation
        assert forward.low == pytest.approx(-back.high, abs=1e-6)


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
    with pytest.raises(InputError, match="one value a seed"):
        paired_difference(np.zeros(3), np.zeros(4))
    with pytest.raises(InputError, match="confidence=95"):
        paired_difference(np.zeros(3), np.ones(3), confidence=95)
