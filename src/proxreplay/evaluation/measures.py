"""Measures of a run: pure functions of what it recorded, and one declaration of each.

`MEASURES` declares every measure once; tables, plots, the page, CSV, the command line and
``result.json`` read it. To add a measure, write its function and add a `Measure` there.

Notation (the paper's Appendix F): ``a_i(j)`` is the accuracy on task i's held-out examples after
stream batch j, ``k_j`` the number of tasks started by then, ``tau`` the last stream batch and
``tau_i`` task i's last one. Sums over ``j`` run over the moments that were evaluated;
docs/measures.md says which measures depend on how dense these are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from proxreplay.errors import InputError
from proxreplay.evaluation.trajectory import Array, Recorded, Series, Trajectory

# The functions -----------------------------------------------------------------------------------


def final_accuracy(accuracy: Array) -> float:
    """Acc: the mean over tasks of the test accuracy ``[K]`` at the end, ``sum_i a_i(tau) / k``."""
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
    """``[J]``: ``TV_j = sum_{m<j} |v(m+1) - v(m)|``, from 0, of accuracies or losses ``[J]``.

    NaN counts as not yet measured.

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


# The declarations --------------------------------------------------------------------------------

Curve = tuple[Array, Array]  # stream batches, and the values there


@dataclass(frozen=True)
class Measure:
    """One measure: one number per run, a curve along the stream, or both."""

    key: str  # unique; names it in files, options and data
    label: str  # for people, short enough for the head of a column
    about: str  # one sentence for people
    # from what a run recorded to one number; None if the run cannot have it
    number: Callable[[Recorded], float | None] | None = None
    # the same as a function of the stream batch
    curve: Callable[[Recorded], Curve | None] | None = None
    # which direction is better; None where neither is
    better: Literal["higher", "lower"] | None = None
    main: bool = False  # whether it belongs to the main table and to result.json
    digits: int = 4  # decimals in tables
    # share lies between 0 and 1; an amount is not bounded
    scale: Literal["share", "amount"] = "share"
    x: Literal["tasks", "minutes"] = "tasks"  # the horizontal axis of its curve


def _from(path: Trajectory | None, of: Callable[[Trajectory], Array]) -> Curve | None:
    return None if path is None else (path.positions.astype(np.float64), of(path))


def _seen(path: Trajectory) -> Array:
    return path.seen_accuracy


def _first_task(path: Trajectory) -> Array:
    return path.accuracy[:, 0]


def _column(series: Series | None, name: str) -> Curve | None:
    if series is None or not (known := np.isfinite(series.values[name])).any():
        return None
    return series.positions[known], series.values[name][known]


def _last(series: Series | None, name: str) -> float | None:
    return None if series is None else float(series.values[name][-1])


def _mean_gap(path: Trajectory, of: Callable[[StabilityGap], float]) -> float | None:
    gaps = stability_gaps(path)
    return float(np.mean([of(gap) for gap in gaps])) if gaps else None


def predictor_accuracy(name: str) -> Measure:
    """The accuracy of another network of the run, such as the one behind an average."""
    return Measure(
        f"accuracy-{name}",
        f"Accuracy of '{name}'",
        f"Mean over the tasks seen so far, as the predictor '{name}' has it.",
        curve=lambda run: _from(run.predictors.get(name), _seen),
    )


MEASURES: tuple[Measure, ...] = (
    Measure(
        "acc",
        "Acc",
        "Test accuracy at the end, mean over tasks.",
        number=lambda run: None if run.test is None else final_accuracy(run.test),
        better="higher",
        main=True,
    ),
    Measure(
        "aaa",
        "AAA",
        "Accuracy on held-out examples, averaged over the whole stream.",
        number=lambda run: average_anytime_accuracy(run.accuracy),
        better="higher",
        main=True,
    ),
    Measure(
        "accuracy",
        "Accuracy",
        "Mean over the tasks seen so far.",
        curve=lambda run: _from(run.accuracy, _seen),
    ),
    Measure(
        "wc_acc",
        "WC-Acc",
        "Worst-case accuracy: the lowest that each task fell to after it was learned.",
        number=lambda run: worst_case_accuracy(run.accuracy),
        curve=lambda run: _from(run.accuracy, worst_case_curve),
        better="higher",
        main=True,
    ),
    Measure(
        "first_task",
        "Accuracy on task 1",
        "On held-out examples of the first task.",
        curve=lambda run: _from(run.accuracy, _first_task),
    ),
    Measure(
        "loss",
        "Loss",
        "Mean cross-entropy over the tasks seen so far.",
        curve=lambda run: _from(run.loss, _seen),
        scale="amount",
    ),
    Measure(
        "forgetting",
        "Forgetting",
        "From a task's best end-of-task accuracy to its last accuracy.",
        number=lambda run: average_forgetting(run.accuracy),
        better="lower",
    ),
    Measure(
        "backward_transfer",
        "Backward transfer",
        "From the accuracy at the end of a task to its last accuracy.",
        number=lambda run: backward_transfer(run.accuracy),
        better="higher",
    ),
    Measure(
        "variation_seen",
        "Variation, all seen",
        "How far the accuracy over all tasks seen has moved up and down in total.",
        number=lambda run: variation_of_seen(run.accuracy),
        curve=lambda run: _from(run.accuracy, lambda path: variation_curve(_seen(path))),
        better="lower",
        scale="amount",
    ),
    Measure(
        "variation_first",
        "Variation, task 1",
        "How far the accuracy on task 1 has moved up and down in total.",
        number=lambda run: total_variation(_first_task(run.accuracy)),
        curve=lambda run: _from(run.accuracy, lambda path: variation_curve(_first_task(path))),
        better="lower",
        scale="amount",
    ),
    Measure(
        "variation_loss",
        "Variation of loss",
        "How far the loss over all tasks seen has moved up and down in total.",
        number=lambda run: None if run.loss is None else variation_of_seen(run.loss),
        curve=lambda run: _from(run.loss, lambda path: variation_curve(_seen(path))),
        better="lower",
        scale="amount",
    ),
    Measure(
        "gap_depth",
        "Dip at switches",
        "How far the accuracy on old tasks fell when a new task began.",
        number=lambda run: _mean_gap(run.accuracy, lambda gap: gap.depth),
        better="lower",
    ),
    Measure(
        "gap_recovery",
        "Recovered",
        "How much of the dip came back before the next task.",
        number=lambda run: _mean_gap(run.accuracy, lambda gap: gap.recovery),
    ),
    Measure(
        "drift",
        "Representation drift",
        "How far the representations of task-1 examples have moved, summed over steps.",
        curve=lambda run: _column(run.drift, "total"),
        scale="amount",
    ),
    Measure(
        "ratio_new",
        "Gradient ratio, new data",
        "Gradient norm after preconditioning over before, for the incoming batch.",
        curve=lambda run: _column(run.gradients, "new"),
    ),
    Measure(
        "ratio_replay",
        "Gradient ratio, replay",
        "Gradient norm after preconditioning over before, for the replayed batch.",
        curve=lambda run: _column(run.gradients, "replay"),
    ),
    Measure(
        "prequential",
        "Prequential accuracy",
        "Of predicting every stream batch before it was learned, over all examples so far.",
        number=lambda run: _last(run.prequential, "accuracy"),
        curve=lambda run: _column(run.prequential, "accuracy"),
        better="higher",
    ),
    Measure(
        "prequential_fading",
        "Prequential accuracy, of late",
        "The same with older examples fading.",
        curve=lambda run: _column(run.prequential, "fading"),
    ),
    Measure(
        "prequential_kappa",
        "Prequential kappa",
        "Cohen's kappa of the same predictions: 0 is guessing with the same frequencies.",
        number=lambda run: _last(run.prequential, "kappa"),
        curve=lambda run: _column(run.prequential, "kappa"),
        better="higher",
    ),
    Measure(
        "regret_majority",
        "Regret, majority",
        "Errors more than by predicting the most frequent label so far; below 0 is better.",
        number=lambda run: _last(run.prequential, "majority"),
        curve=lambda run: _column(run.prequential, "majority"),
        better="lower",
        digits=0,
        scale="amount",
    ),
    Measure(
        "regret_no_change",
        "Regret, no change",
        "Errors more than by repeating the last label; below 0 is better.",
        number=lambda run: _last(run.prequential, "no_change"),
        curve=lambda run: _column(run.prequential, "no_change"),
        better="lower",
        digits=0,
        scale="amount",
    ),
    Measure(
        "share",
        "Share of LPR that acts",
        "0 where incoming and replayed examples are equally hard, 1 where one is twice as hard.",
        curve=lambda run: _column(run.share, "share"),
    ),
    Measure(
        "minutes",
        "Minutes",
        "Learning only.",
        number=lambda run: _last(run.learning_minutes, "learning"),
        better="lower",
        digits=2,
    ),
    Measure(
        "time",
        "Accuracy against time",
        "Against minutes of learning, evaluations not counted.",
        curve=lambda run: None if run.seconds is None else _from(run.accuracy, _seen),
        x="minutes",
    ),
)
MAIN = tuple(measure for measure in MEASURES if measure.main)
BY_KEY = {measure.key: measure for measure in MEASURES}


def numbers(run: Recorded, measures: tuple[Measure, ...] = MEASURES) -> dict[str, float | None]:
    """Every measure of a run that is one number, by key."""
    return {m.key: m.number(run) for m in measures if m.number is not None}
