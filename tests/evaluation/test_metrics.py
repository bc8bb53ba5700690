"""Acc, AAA and WC-Acc against the paper's sums written out as loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.errors import InputError
from proxreplay.evaluation import (
    Trajectory,
    average_anytime_accuracy,
    estimate,
    final_accuracy,
    worst_case_accuracy,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    tasks = np.repeat(np.arange(len(lengths)), lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    accuracy = rng.random((len(tasks), len(lengths)))
    accuracy[np.arange(len(lengths)) > tasks[:, None]] = np.nan
    return Trajectory(np.arange(len(tasks)), tasks, accuracy)


@settings(deadline=None)
@given(trajectories())
def test_aaa_and_worst_case_equal_the_papers_sums(path: Trajectory) -> None:
    a, k = path.accuracy, path.tasks + 1
    tau = len(a)
    anytime = sum(sum(a[j, i] for i in range(k[j])) / k[j] for j in range(tau)) / tau
    assert average_anytime_accuracy(path) == pytest.approx(anytime)

    last = k[-1] - 1
    worst = a[-1, last]
    for i in range(last):
        after = [a[j, i] for j in range(tau) if path.tasks[j] > i]
        worst += min(after)
    assert worst_case_accuracy(path) == pytest.approx(worst / (last + 1))


def test_an_evaluation_stands_for_the_batches_since_the_previous_one() -> None:
    every_batch = Trajectory(np.arange(4), np.zeros(4, int), np.array([[0.1], [0.1], [0.1], [0.7]]))
    sparse = Trajectory(np.array([2, 3]), np.zeros(2, int), np.array([[0.1], [0.7]]))
    assert average_anytime_accuracy(sparse) == pytest.approx(average_anytime_accuracy(every_batch))


def test_items_of_a_tasks_own_training_do_not_count_for_its_worst_case() -> None:
    accuracy = np.array([[0.0, np.nan], [0.9, np.nan], [0.8, 0.1], [0.85, 0.6]])
    path = Trajectory(np.arange(4), np.array([0, 0, 1, 1]), accuracy)
    assert worst_case_accuracy(path) == pytest.approx((0.8 + 0.6) / 2)


def test_progress_gives_every_task_the_same_length() -> None:
    path = Trajectory(np.array([0, 1, 2, 3, 7]), np.array([0, 0, 1, 1, 1]), np.full((5, 2), 0.5))
    np.testing.assert_allclose(path.progress, [0.5, 1.0, 1 + 1 / 6, 1 + 2 / 6, 2.0])


def test_estimates_over_seeds() -> None:
    values = np.array([0.2, 0.4, 0.9])
    result = estimate(values)
    assert result.mean == pytest.approx(0.5)
    spread = np.sqrt(sum((v - 0.5) ** 2 for v in values) / 2)
    assert result.standard_error == pytest.approx(spread / np.sqrt(3))
    assert np.isnan(estimate(values[:1]).standard_error)
    assert final_accuracy(values) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("positions", "tasks"),
    [([0, 0], [0, 0]), ([0, 1], [1, 0]), ([], []), ([0], [0, 0])],
    ids=["positions repeat", "tasks go back", "empty", "lengths differ"],
)
def test_a_trajectory_that_makes_no_sense_is_refused(
    positions: list[int], tasks: list[int]
) -> None:
    with pytest.raises(InputError, match="Trajectory"):
        Trajectory(np.array(positions), np.array(tasks), np.zeros((len(positions), 1)))
