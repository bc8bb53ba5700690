"""Measures over time as curves with a band over seeds: what plots and pages draw.

Tasks differ in length between seeds, so a curve runs over progress through the tasks: task i from
i to i + 1, whatever its length. Right after a switch the grid is finer, because the dips are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from proxreplay.evaluation import Trajectory
from proxreplay.evaluation.metrics import Array, variation_curve, worst_case_curve
from proxreplay.report.study import Group, Run, Section

Line = tuple[Array, Array]  # where, and what was measured there


@dataclass(frozen=True)
class Measure:
    """Something that is followed over time.

    Args:
        name: short and unique, for options and data.
        title: for people.
        about: one sentence for people.
        line: from a run and its progress at every moment to what is drawn; None without data.
        x: what the horizontal axis means.
        kind: ``share`` (0 to 1), or ``amount`` (from 0).
    """

    name: str
    title: str
    about: str
    line: Callable[[Run, Array], Line | None]
    x: Literal["tasks", "minutes"] = "tasks"
    kind: Literal["share", "amount"] = "share"


@dataclass(frozen=True)
class Curve:
    """Mean and range over seeds.

    Args:
        label: of the group.
        index: of the group in its section; it decides the colour everywhere.
        x: ``[J]``.
        mean: ``[J]``, NaN where nothing was measured.
        low: ``[J]``, the lowest seed.
        high: ``[J]``, the highest seed.
    """

    label: str
    index: int
    x: Array
    mean: Array
    low: Array
    high: Array


def _seen(run: Run, progress: Array) -> Line | None:
    return None if run.accuracy is None else (progress, run.accuracy.seen_accuracy)


def _worst_case(run: Run, progress: Array) -> Line | None:
    return None if run.accuracy is None else (progress, worst_case_curve(run.accuracy))


def _first_task(run: Run, progress: Array) -> Line | None:
    return None if run.accuracy is None else (progress, run.accuracy.accuracy[:, 0])


def _online(run: Run, progress: Array) -> Line | None:
    return None if run.online is None else (progress, run.online.seen_accuracy)


def _loss(run: Run, progress: Array) -> Line | None:
    return None if run.loss is None else (progress, run.loss.seen_accuracy)


def _variation(run: Run, progress: Array) -> Line | None:
    if run.accuracy is None:
        return None
    return progress, variation_curve(run.accuracy.seen_accuracy)


def _variation_first(run: Run, progress: Array) -> Line | None:
    return (
        None if run.accuracy is None else (progress, variation_curve(run.accuracy.accuracy[:, 0]))
    )


def _variation_loss(run: Run, progress: Array) -> Line | None:
    return None if run.loss is None else (progress, variation_curve(run.loss.seen_accuracy))


def _drift(run: Run, progress: Array) -> Line | None:
    if run.drift is None or run.accuracy is None:
        return None
    return _at(run.accuracy, progress, run.drift.positions), run.drift.values["total"]


def _ratio(part: str) -> Callable[[Run, Array], Line | None]:
    def line(run: Run, progress: Array) -> Line | None:
        if run.gradients is None or run.accuracy is None:
            return None
        values = run.gradients.values[part]
        known = np.isfinite(values)
        if not known.any():
            return None
        return _at(run.accuracy, progress, run.gradients.positions[known]), values[known]

    return line


def _against_time(run: Run, progress: Array) -> Line | None:
    if run.accuracy is None or run.seconds is None:
        return None
    after = np.concatenate([[0.0], run.seconds.positions])
    minutes = np.concatenate([[0.0], run.learning_seconds(run.seconds)]) / 60
    return np.interp(run.accuracy.positions + 1, after, minutes), run.accuracy.seen_accuracy


def _at(path: Trajectory, progress: Array, positions: Array) -> Array:
    return np.interp(positions, path.positions, progress)


_ALL = (
    Measure("accuracy", "Accuracy", "Mean over the tasks seen so far.", _seen),
    Measure(
        "worst-case",
        "Worst-case accuracy",
        "The lowest that each earlier task ever fell to, averaged with the current task.",
        _worst_case,
    ),
    Measure(
        "first-task", "Accuracy on the first task", "Held-out examples of task 1.", _first_task
    ),
    Measure("loss", "Loss", "Mean cross-entropy over the tasks seen so far.", _loss, kind="amount"),
    Measure(
        "variation",
        "Total variation of accuracy",
        "How far the accuracy over all tasks seen has travelled up and down; lower is steadier.",
        _variation,
        kind="amount",
    ),
    Measure(
        "variation-first",
        "Total variation on the first task",
        "How far the accuracy on task 1 has travelled up and down; lower is steadier.",
        _variation_first,
        kind="amount",
    ),
    Measure(
        "variation-loss",
        "Total variation of loss",
        "How far the loss over all tasks seen has travelled up and down; lower is steadier.",
        _variation_loss,
        kind="amount",
    ),
    Measure(
        "online",
        "Accuracy of the online network",
        "Where an average of the weights predicts: the network behind it.",
        _online,
    ),
    Measure(
        "drift",
        "Representation drift",
        "How far the representations of task-1 examples have moved, summed over steps.",
        _drift,
        kind="amount",
    ),
    Measure(
        "ratio-new",
        "Gradient ratio, new data",
        "Gradient norm after preconditioning over before, for the incoming batch.",
        _ratio("new"),
    ),
    Measure(
        "ratio-replay",
        "Gradient ratio, replay",
        "Gradient norm after preconditioning over before, for the replayed batch.",
        _ratio("replay"),
    ),
    Measure(
        "time",
        "Accuracy against time",
        "Against minutes of learning, evaluations not counted.",
        _against_time,
        x="minutes",
    ),
)
MEASURES = {measure.name: measure for measure in _ALL}


def curves(section: Section, measure: Measure, points: int = 600) -> list[Curve]:
    """One curve for every group of a section that has the data.

    Args:
        section: whose groups are drawn.
        measure: what is drawn.
        points: at most about so many a curve.
    """
    lengths = _task_lengths(section)
    return [
        curve
        for index, group in enumerate(section.groups)
        if (curve := _curve(index, group, measure, section.tasks, lengths, points)) is not None
    ]


def from_trajectories(
    label: str, index: int, paths: Sequence[Trajectory], points: int = 600
) -> Curve:
    """The anytime accuracy of complete runs."""
    lines = [(path.progress, path.seen_accuracy) for path in paths]
    return _band(label, index, lines, _task_grid(lines, int(paths[0].tasks[-1]) + 1, points))


def progress_of(run: Run, lengths: dict[int, int]) -> Array:
    """Progress through the tasks, ``[J]``; a task that is not over ends where others' do."""
    assert run.accuracy is not None
    path = run.accuracy
    progress = path.progress
    last = int(path.tasks[-1])
    if run.status != "complete":
        inside = path.tasks == last
        start = path.positions[~inside][-1] if last > 0 else -1
        done = int(path.positions[-1] - start)
        expected = max(lengths.get(last, lengths.get(last - 1, done)), done)
        progress = np.where(inside, last + (progress - last) * done / expected, progress)
    return progress


def _task_lengths(section: Section) -> dict[int, int]:
    """Stream batches a task, as far as runs got through it."""
    lengths: dict[int, int] = {}
    for run in section.runs:
        if run.accuracy is None:
            continue
        path = run.accuracy
        over = path.tasks[-1] + (run.status == "complete")
        ends = [path.positions[path.tasks == t][-1] for t in range(over) if (path.tasks == t).any()]
        for task, length in enumerate(np.diff(ends, prepend=-1)):
            lengths[task] = max(lengths.get(task, 0), int(length))
    return lengths


def _curve(
    index: int, group: Group, measure: Measure, tasks: int, lengths: dict[int, int], points: int
) -> Curve | None:
    lines = [
        line
        for run in group.runs
        if run.accuracy is not None
        and (line := measure.line(run, progress_of(run, lengths))) is not None
    ]
    if not lines:
        return None
    if measure.x == "minutes":
        grid = np.linspace(0, max(x[-1] for x, _ in lines), points + 1)[1:]
    else:
        grid = _task_grid(lines, tasks, points)
    return _band(group.label, index, lines, grid)


def _task_grid(lines: Sequence[Line], tasks: int, points: int) -> Array:
    """Points of every task, finer after its start if there are more moments than points."""
    densest = max(int(np.histogram(x, np.arange(tasks + 1) + 1e-9)[0].max()) for x, _ in lines)
    count = max(2, min(densest, points // tasks))
    inside = np.arange(1, count + 1) / count
    if densest > count:
        inside = inside**2
    return np.concatenate([task + inside for task in range(tasks)])


def _band(label: str, index: int, lines: Sequence[Line], grid: Array) -> Curve:
    """Mean, lowest and highest on a grid; a seed counts as far as it got."""
    values = np.stack([interpolate(grid, x, y) for x, y in lines])
    known = np.isfinite(values).any(axis=0)
    mean, low, high = (np.full(len(grid), np.nan) for _ in range(3))
    mean[known] = np.nanmean(values[:, known], axis=0)
    low[known] = np.nanmin(values[:, known], axis=0)
    high[known] = np.nanmax(values[:, known], axis=0)
    return Curve(label, index, grid, mean, low, high)


def interpolate(grid: Array, x: Array, y: Array) -> Array:
    """Linear inside a task; a task switch is a jump, not a slope; NaN after the last moment."""
    result = np.full(len(grid), np.nan)
    at, here = np.ceil(grid - 1e-9), np.ceil(x - 1e-9)
    for task in np.unique(here):
        moments, wanted = here == task, at == task
        result[wanted] = np.interp(grid[wanted], x[moments], y[moments])
    result[grid > x[-1] + 1e-9] = np.nan
    return result


def task_accuracy_map(group: Group, tasks: int, bins: int = 12) -> Array:
    """``[tasks, tasks * bins]``: accuracy on each task over time, mean over seeds; NaN before."""
    lines = [(run, run.accuracy) for run in group.runs if run.accuracy is not None]
    grid = np.concatenate([task + np.arange(1, bins + 1) / bins for task in range(tasks)])
    total = np.full((len(lines), tasks, len(grid)), np.nan)
    for image, (run, path) in zip(total, lines, strict=True):
        progress = progress_of(run, {})
        for task in range(min(tasks, path.accuracy.shape[1])):
            started = path.tasks >= task
            image[task] = interpolate(grid, progress[started], path.accuracy[started, task])
            image[task, grid <= task + 1e-9] = np.nan
    known = np.isfinite(total).any(axis=0)
    mean = np.full(known.shape, np.nan)
    mean[known] = np.nanmean(total[:, known], axis=0)
    return mean
