"""Measures of a run as pure functions of recorded accuracies (the paper's Appendix F and Analysis).

Notation: ``a_i(j)`` is the accuracy on task i's held-out examples after stream batch j, ``k_j`` the
number of tasks started by then, ``tau`` the last stream batch and ``tau_i`` task i's last one. Sums
over ``j`` run over the moments at which accuracies were measured; docs/measures.md says which
measures depend on how dense these are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxreplay.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trajectory:
    """Accuracies over time, at the moments at which they were measured.

    Args:
        positions: ``[J]``, the stream batch (counted from 0) after which each was measured,
            ascending.
        tasks: ``[J]``, the task (counted from 0) that this stream batch came from.
        accuracy: ``[J, K]``, ``a_i(j)``; NaN for tasks that had not started.
    """

    positions: NDArray[np.int64]
    tasks: NDArray[np.int64]
    accuracy: Array

    def __post_init__(self) -> None:
        moments = len(self.positions)
        if moments == 0 or len(self.tasks) != moments or len(self.accuracy) != moments:
            raise InputError(
                f"Trajectory: {moments} positions, {len(self.tasks)} tasks and "
                f"{len(self.accuracy)} rows of accuracy; give one of each a moment, at least one."
            )
        if (np.diff(self.positions) <= 0).any() or (np.diff(self.tasks) < 0).any():
            raise InputError("Trajectory: positions must ascend and tasks must not go back.")

    @property
    def seen_accuracy(self) -> Array:
        """``[J]``: the mean accuracy over the tasks started so far, ``sum_i a_i(j) / k_j``."""
        started = np.arange(self.accuracy.shape[1]) <= self.tasks[:, None]
        total: Array = np.where(started, self.accuracy, 0.0).sum(axis=1)
        return total / (self.tasks + 1)

    @property
    def progress(self) -> Array:
        """``[J]``: tasks done, with fractions; task i lasts from i to i + 1 whatever its length."""
        first = np.searchsorted(self.tasks, self.tasks, side="left")
        last = np.searchsorted(self.tasks, self.tasks, side="right") - 1
        start = np.where(first > 0, self.positions[first - 1], -1)
        length = self.positions[last] - start
        return self.tasks + (self.positions - start) / length


def final_accuracy(accuracy: Array) -> float:
    """Acc: the mean over tasks of the accuracy at the end, ``sum_i a_i(tau) / k``.

    Args:
        accuracy: ``[K]``, on each task's test examples.
    """
    return float(np.mean(accuracy))


def average_anytime_accuracy(trajectory: Trajectory) -> float:
    """AAA: ``1/tau sum_j 1/k_j sum_i a_i(j)``.

    Where not every stream batch was evaluated, each evaluation stands for the batches since the
    previous one, so that extra evaluations around task switches do not count double.
    """
    stands_for = np.diff(trajectory.positions, prepend=-1)
    return float(np.average(trajectory.seen_accuracy, weights=stands_for))


def worst_case_accuracy(trajectory: Trajectory) -> float:
    """WC-Acc: ``1/k [a_k(tau) + sum_{i<k} min_{tau_i < j <= tau} a_i(j)]``.

    With fewer evaluations the minimum is taken over fewer moments and is optimistic.
    """
    last = int(trajectory.tasks[-1])
    worst = [trajectory.accuracy[trajectory.tasks > task, task].min() for task in range(last)]
    return float(np.mean([*worst, trajectory.accuracy[-1, last]]))


def worst_case_curve(trajectory: Trajectory) -> Array:
    """``[J]``: WC-Acc as it would be if the stream ended at each of the moments."""
    tasks, accuracy = trajectory.tasks, trajectory.accuracy
    earlier = np.arange(accuracy.shape[1]) < tasks[:, None]
    lowest = np.minimum.accumulate(np.where(earlier, accuracy, np.inf), axis=0)
    total: Array = np.where(earlier, lowest, 0.0).sum(axis=1)
    return (total + accuracy[np.arange(len(tasks)), tasks]) / (tasks + 1)


def accuracy_after_tasks(trajectory: Trajectory) -> Array:
    """``[K, K]``: row t holds ``a_i(tau_t)``, the accuracies at the end of task t; NaN above."""
    last = np.searchsorted(trajectory.tasks, np.arange(trajectory.tasks[-1] + 1), side="right") - 1
    return trajectory.accuracy[last][:, : len(last)]


def average_forgetting(trajectory: Trajectory) -> float:
    """``1/(k-1) sum_{i<k} [max_{i <= t < k} a_i(tau_t) - a_i(tau)]``; NaN for a single task.

    The peak is taken over the ends of tasks (Chaudhry et al., 2018), so that it does not depend on
    how often a run was evaluated. Negative if the tasks got better after they were learned.
    """
    after = accuracy_after_tasks(trajectory)
    if len(after) < 2:
        return float("nan")
    peaks = np.nanmax(after[:-1, :-1], axis=0)
    return float(np.mean(peaks - after[-1, :-1]))


def backward_transfer(trajectory: Trajectory) -> float:
    """``1/(k-1) sum_{i<k} [a_i(tau) - a_i(tau_i)]``; NaN for a single task (Lopez-Paz, 2017)."""
    after = accuracy_after_tasks(trajectory)
    if len(after) < 2:
        return float("nan")
    return float(np.mean(after[-1, :-1] - after.diagonal()[:-1]))


def variation_curve(values: Array) -> Array:
    """``[J]``: ``TV_j = sum_{m<j} |v(m+1) - v(m)|``, from 0; NaN counts as not yet measured.

    Args:
        values: ``[J]``, accuracies or losses at successive moments.

    >>> variation_curve(np.array([0.5, 0.25, 0.75])).tolist()
    [0.0, 0.25, 0.75]
    """
    steps = np.abs(np.diff(values, prepend=values[:1]))
    curve: Array = np.cumsum(np.nan_to_num(steps))
    return curve


def total_variation(values: Array) -> float:
    """``TV = sum_j |v(j+1) - v(j)|`` over the moments ``[J]``; with fewer moments it is smaller."""
    return float(variation_curve(values)[-1])


def variation_of_seen(trajectory: Trajectory) -> float:
    """Total variation of the mean over all tasks seen so far (the paper's appendix).

    The evaluated set grows at every switch; these jumps count, as they do in the paper.
    """
    return total_variation(trajectory.seen_accuracy)


def variation_of_tasks(trajectory: Trajectory) -> Array:
    """``[K]``: total variation on each task's examples; task 0's is the paper's Figure 1."""
    return np.array([total_variation(column) for column in trajectory.accuracy.T])


@dataclass(frozen=True)
class StabilityGap:
    """What a switch to a new task did to the mean accuracy over the tasks before it.

    Args:
        task: the new task.
        before: the accuracy just before it began.
        lowest: the lowest accuracy while it was learned.
        after: the accuracy at its end.
        batches_to_lowest: stream batches of the new task until then.
        batches_to_recovery: stream batches of the new task until the wanted share of the loss was
            made good; 0 if nothing was lost, None if it never was.
    """

    task: int
    before: float
    lowest: float
    after: float
    batches_to_lowest: int
    batches_to_recovery: int | None

    @property
    def depth(self) -> float:
        """``before - lowest``; negative if the old tasks only got better."""
        return self.before - self.lowest

    @property
    def recovery(self) -> float:
        """``after - lowest``: what came back before the next task."""
        return self.after - self.lowest


def stability_gaps(trajectory: Trajectory, share: float = 0.9) -> list[StabilityGap]:
    """The fall and the recovery of the old tasks' accuracy at every task switch.

    Args:
        trajectory: accuracies; the denser around switches, the truer the depth.
        share: recovered means that this share of the depth was made good.
    """
    if not 0 < share <= 1:
        raise InputError(f"stability_gaps: share={share}; give a number above 0 and at most 1.")
    gaps = []
    for task in np.unique(trajectory.tasks)[1:]:
        moments = np.flatnonzero(trajectory.tasks == task)
        old = trajectory.accuracy[moments[0] - 1 : moments[-1] + 1, :task].mean(axis=1)
        batches = trajectory.positions[moments] - trajectory.positions[moments[0] - 1]
        before, during = old[0], old[1:]
        low = int(during.argmin())
        goal = during[low] + share * (before - during[low])
        recovered = low + np.flatnonzero(during[low:] >= goal)
        to_recovery = int(batches[recovered[0]]) if len(recovered) else None
        gaps.append(
            StabilityGap(
                int(task),
                float(before),
                float(during[low]),
                float(during[-1]),
                int(batches[low]),
                0 if during[low] >= before else to_recovery,
            )
        )
    return gaps
