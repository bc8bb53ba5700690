"""Measures along the stream as curves with a band over seeds: what plots and the page draw.

Tasks differ in length between seeds, so a curve runs over progress through the tasks: task i from
i to i + 1, whatever its length. Right after a switch the grid is finer, because the dips are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxreplay.evaluation import MEASURES, Measure, Recorded
from proxreplay.evaluation.measures import predictor_accuracy
from proxreplay.evaluation.trajectory import Array
from proxreplay.experiments.results import StoredRun
from proxreplay.report.grouping import Group, Section

Line = tuple[Array, Array]  # where on the horizontal axis, and what was measured there


@dataclass(frozen=True)
class Curve:
    """Mean and range over seeds."""

    label: str  # of the group
    index: int  # of the group in its section; it decides the colour everywhere
    x: Array  # [J]
    mean: Array  # [J], NaN where nothing was measured
    low: Array  # [J], the lowest seed
    high: Array  # [J], the highest seed


def drawable(section: Section) -> list[Measure]:
    """Every measure that has a curve, one more for each further predictor of the runs."""
    runs = [run.recorded for run in section.runs if run.recorded is not None]
    names = dict.fromkeys(name for run in runs for name in run.predictors)
    return [*(m for m in MEASURES if m.curve), *map(predictor_accuracy, names)]


def curves(section: Section, measure: Measure, points: int = 600) -> list[Curve]:
    """One curve of at most about so many points for every group of a section that has the data."""
    lengths = _task_lengths(section)
    return [
        curve
        for index, group in enumerate(section.groups)
        if (curve := _curve(index, group, measure, section.tasks, lengths, points)) is not None
    ]


def _progress(run: StoredRun, path: Recorded, lengths: dict[int, int]) -> Array:
    """Progress through the tasks, ``[J]``; a task that is not over ends where others' do."""
    positions, tasks = path.accuracy.positions, path.accuracy.tasks
    progress = path.accuracy.progress
    last = int(tasks[-1])
    if run.status != "complete":
        inside = tasks == last
        start = positions[~inside][-1] if last > 0 else -1
        done = int(positions[-1] - start)
        expected = max(lengths.get(last, lengths.get(last - 1, done)), done)
        progress = np.where(inside, last + (progress - last) * done / expected, progress)
    return progress


def _task_lengths(section: Section) -> dict[int, int]:
    """Stream batches per task, as far as runs got through it."""
    lengths: dict[int, int] = {}
    for run in section.runs:
        if run.recorded is None:
            continue
        path = run.recorded.accuracy
        over = path.tasks[-1] + (run.status == "complete")
        ends = [path.positions[path.tasks == t][-1] for t in range(over) if (path.tasks == t).any()]
        for task, length in enumerate(np.diff(ends, prepend=-1)):
            lengths[task] = max(lengths.get(task, 0), int(length))
    return lengths


def _line(run: StoredRun, measure: Measure, lengths: dict[int, int]) -> Line | None:
    """What a run has of a measure, over progress or over minutes of learning."""
    path = run.recorded
    if path is None or measure.curve is None or (found := measure.curve(path)) is None:
        return None
    positions, values = found
    spent = path.learning_minutes
    if measure.x == "minutes" and spent is not None:
        after = np.concatenate([[0.0], spent.positions])
        minutes = np.concatenate([[0.0], spent.values["learning"]])
        return np.interp(positions + 1, after, minutes), values
    moments = np.concatenate([[-1.0], path.accuracy.positions])  # before the first batch: 0
    progress = np.concatenate([[0.0], _progress(run, path, lengths)])
    return np.interp(positions, moments, progress), values


def _curve(
    index: int, group: Group, measure: Measure, tasks: int, lengths: dict[int, int], points: int
) -> Curve | None:
    lines = [line for run in group.runs if (line := _line(run, measure, lengths)) is not None]
    if not lines:
        return None
    if measure.x == "minutes":
        grid = np.linspace(0, max(x[-1] for x, _ in lines), points + 1)[1:]
        found = [np.interp(grid, x, y, right=np.nan) for x, y in lines]
    else:
        grid = _task_grid(lines, tasks, points)
        found = [interpolate(grid, x, y) for x, y in lines]
    values = np.stack(found)  # a seed counts as far as it got
    low, high = np.fmin.reduce(values), np.fmax.reduce(values)  # NaN only where all are
    return Curve(group.label, index, grid, _mean_of_known(values), low, high)


def _task_grid(lines: Sequence[Line], tasks: int, points: int) -> Array:
    """Every moment and end of a task; if too many, points that are finer after each switch."""
    moments = np.unique(np.concatenate([np.arange(1, tasks + 1), *(x for x, _ in lines)]).round(9))
    if len(moments) <= points:
        return moments
    count = max(2, points // tasks)
    inside = (np.arange(1, count + 1) / count) ** 2
    return np.concatenate([task + inside for task in range(tasks)])


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
    grid = np.concatenate([task + np.arange(1, bins + 1) / bins for task in range(tasks)])
    images = []
    for run in group.runs:
        if run.recorded is None:
            continue
        image = np.full((tasks, len(grid)), np.nan)
        path, progress = run.recorded.accuracy, _progress(run, run.recorded, {})
        for task in range(min(tasks, path.accuracy.shape[1])):
            started = path.tasks >= task
            image[task] = interpolate(grid, progress[started], path.accuracy[started, task])
            image[task, grid <= task + 1e-9] = np.nan
        images.append(image)
    return _mean_of_known(np.stack(images))


def _mean_of_known(values: Array) -> Array:
    """The mean over the first axis of what is not NaN; NaN where nothing is known."""
    mean: Array = np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
    return mean
