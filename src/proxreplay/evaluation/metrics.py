"""The paper's measures as pure functions of recorded accuracies (its Appendix F).

Notation: ``a_i(j)`` is the accuracy on task i's held-out examples after stream batch j, ``k_j`` the
number of tasks started by then, ``tau`` the last stream batch and ``tau_i`` task i's last one.
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
        return np.array(
            [row[: task + 1].mean() for row, task in zip(self.accuracy, self.tasks, strict=True)]
        )

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
