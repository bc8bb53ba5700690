"""Every measure against its definition written out as loops, on random accuracy matrices."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.errors import InputError
from proxreplay.evaluation import (
    Trajectory,
    average_anytime_accuracy,
    average_forgetting,
    backward_transfer,
    final_accuracy,
    stability_gaps,
    total_variation,
    variation_of_seen,
    variation_of_tasks,
    worst_case_accuracy,
)
from proxreplay.evaluation.measures import variation_curve, worst_case_curve


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Random accuracies: up to 5 tasks of up to 6 moments, at gaps of up to 4 stream batches."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    tasks = np.repeat(np.arange(len(lengths)), lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    accuracy = rng.random((len(tasks), len(lengths)))
    accuracy[np.arange(len(lengths)) > tasks[:, None]] = np.nan
    positions = np.cumsum(rng.integers(1, 5, len(tasks))) - 1
    return Trajectory(positions, tasks, accuracy)


def naive_worst_case(path: Trajectory, moments: int) -> float:
    a, tasks = path.accuracy[:moments], path.tasks[:moments]
    last = tasks[-1]
    worst = a[-1, last]
    for i in range(last):
        worst += min(a[j, i] for j in range(moments) if tasks[j] > i)
    return worst / (last + 1)


@settings(deadline=None)
@given(trajectories())
def test_aaa_and_worst_case_equal_the_papers_sums(path: Trajectory) -> None:
    tau, a = int(path.positions[-1]) + 1, path.accuracy
    total = 0.0
    for batch in range(tau):
        j = next(j for j, position in enumerate(path.positions) if position >= batch)
        k = path.tasks[j] + 1
        total += sum(a[j, i] for i in range(k)) / k
    assert average_anytime_accuracy(path) == pytest.approx(total / tau)
    assert worst_case_accuracy(path) == pytest.approx(naive_worst_case(path, len(a)))


@settings(deadline=None)
@given(trajectories())
def test_the_worst_case_curve_is_the_worst_case_of_every_beginning(path: Trajectory) -> None:
    expected = [naive_worst_case(path, moments) for moments in range(1, len(path.tasks) + 1)]
    assert worst_case_curve(path).tolist() == pytest.approx(expected)


@settings(deadline=None)
@given(trajectories())
def test_forgetting_and_backward_transfer_equal_loops_over_task_ends(path: Trajectory) -> None:
    k = int(path.tasks[-1]) + 1
    end = {t: max(j for j in range(len(path.tasks)) if path.tasks[j] == t) for t in range(k)}
    if k == 1:
        assert math.isnan(average_forgetting(path))
        assert math.isnan(backward_transfer(path))
        return
    a = path.accuracy
    forgotten = [max(a[end[t], i] for t in range(i, k - 1)) - a[-1, i] for i in range(k - 1)]
    transferred = [a[-1, i] - a[end[i], i] for i in range(k - 1)]
    assert average_forgetting(path) == pytest.approx(sum(forgotten) / (k - 1))
    assert backward_transfer(path) == pytest.approx(sum(transferred) / (k - 1))


@settings(deadline=None)
@given(trajectories())
def test_total_variation_equals_the_papers_sum(path: Trajectory) -> None:
    a, moments = path.accuracy, len(path.tasks)
    seen = [sum(a[j, i] for i in range(k + 1)) / (k + 1) for j, k in enumerate(path.tasks)]
    assert variation_of_seen(path) == pytest.approx(
        sum(abs(seen[j + 1] - seen[j]) for j in range(moments - 1))
    )
    for i, variation in enumerate(variation_of_tasks(path)):
        alive = [a[j, i] for j in range(moments) if path.tasks[j] >= i]
        expected = sum(abs(after - before) for before, after in itertools.pairwise(alive))
        assert variation == pytest.approx(expected)


def test_the_variation_curve_starts_at_zero_and_ends_at_the_total() -> None:
    values = np.array([np.nan, 0.25, 0.75, 0.5])
    assert variation_curve(values).tolist() == [0.0, 0.0, 0.5, 0.75]
    assert total_variation(values) == 0.75


@settings(deadline=None)
@given(trajectories(), st.sampled_from([0.5, 0.9, 1.0]))
def test_stability_gaps_equal_a_walk_through_every_switch(path: Trajectory, share: float) -> None:
    a, gaps = path.accuracy, stability_gaps(path, share)
    assert [gap.task for gap in gaps] == list(range(1, int(path.tasks[-1]) + 1))
    for gap in gaps:
        moments = [j for j in range(len(a)) if path.tasks[j] == gap.task]
        start = moments[0] - 1
        old = {j: sum(a[j, i] for i in range(gap.task)) / gap.task for j in [start, *moments]}
        low = min(moments, key=lambda j: old[j])
        assert gap.depth == pytest.approx(old[start] - old[low])
        assert gap.recovery == pytest.approx(old[moments[-1]] - old[low])
        assert gap.batches_to_lowest == path.positions[low] - path.positions[start]
        goal = old[low] + share * (old[start] - old[low])
        back = [path.positions[j] - path.positions[start] for j in moments if j >= low]
        back = [
            b for b, j in zip(back, moments[moments.index(low) :], strict=True) if old[j] >= goal
        ]
        if gap.depth <= 0:
            assert gap.batches_to_recovery == 0
        else:
            assert gap.batches_to_recovery == (back[0] if back else None)


def test_a_dip_and_its_recovery_by_hand() -> None:
    accuracy = np.array([[0.9, np.nan], [0.3, 0.5], [0.6, 0.8], [0.85, 0.9]])
    path = Trajectory(np.array([9, 10, 12, 19]), np.array([0, 1, 1, 1]), accuracy)
    (gap,) = stability_gaps(path)
    assert (gap.depth, gap.recovery) == (pytest.approx(0.6), pytest.approx(0.55))
    assert (gap.batches_to_lowest, gap.batches_to_recovery) == (1, 10)
    assert stability_gaps(path, share=1.0)[0].batches_to_recovery is None
    with pytest.raises(InputError, match="share=0"):
        stability_gaps(path, share=0)


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


def test_final_accuracy_is_the_mean_over_tasks() -> None:
    assert final_accuracy(np.array([0.2, 0.4, 0.9])) == pytest.approx(0.5)


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
