"""What a run recorded along its stream, as arrays: the input of every measure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from proxreplay.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trajectory:
    """Accuracies (or losses) of every task over time."""

    # [J], the stream batch (from 0) after which each was measured, ascending
    positions: NDArray[np.int64]
    tasks: NDArray[np.int64]  # [J], the task (from 0) that this stream batch came from
    accuracy: Array  # [J, K], a_i(j); NaN for tasks that had not started

    def __post_init__(self) -> None:
        moments = len(self.positions)
        if moments == 0 or len(self.tasks) != moments or len(self.accuracy) != moments:
            raise InputError(
                f"Trajectory: {moments} positions, {len(self.tasks)} tasks and "
                f"{len(self.accuracy)} rows of accuracy; give one of each per moment, at least one."
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


@dataclass(frozen=True)
class Series:
    """Named numbers along the stream."""

    positions: Array  # [J], stream batches
    values: Mapping[str, Array]  # [J] each, by name; NaN where one is missing


@dataclass(frozen=True)
class Recorded:
    """Everything that measures are computed from."""

    accuracy: Trajectory  # on validation examples, of the network that predicts
    loss: Trajectory | None = None  # on the same examples
    # [K], accuracy on each task's test examples at the end; None if not evaluated
    test: Array | None = None
    # validation accuracy of the other networks of the run, by name, such as online where an average
    # of the weights predicts
    predictors: Mapping[str, Trajectory] = field(default_factory=dict)
    drift: Series | None = None  # representation drift so far, by layer and in total
    gradients: Series | None = None  # gradient ratios of new, replay and all data
    # accuracy, fading accuracy, kappa and regret of predicting each batch before it was learned
    prequential: Series | None = None
    # seconds spent so far by activity, after positions stream batches
    seconds: Series | None = None
    share: Series | None = None  # how much of LPR acts, where its strength sets itself

    @property
    def learning_minutes(self) -> Series | None:
        """Minutes of learning, refreshes included and evaluations left out, as ``learning``."""
        if self.seconds is None:
            return None
        spent = [v for k, v in self.seconds.values.items() if k in ("learning", "refreshing")]
        total = np.sum(spent, axis=0) if spent else np.zeros(len(self.seconds.positions))
        return Series(self.seconds.positions, {"learning": total / 60})
