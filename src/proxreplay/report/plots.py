"""Plots: legible in print and on a phone, colour-blind safe, seeds as bands, thin task boundaries.

Every function takes a section of a study and returns a figure of its own; nothing global is
touched. `FIGURES`, at the end, names them for the command line.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from proxreplay.errors import DataError
from proxreplay.evaluation import Measure, estimate
from proxreplay.evaluation.measures import BY_KEY
from proxreplay.files import replacing
from proxreplay.report.curves import Curve, curves, task_accuracy_map
from proxreplay.report.grouping import Section
from proxreplay.report.paper import paper_sensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette with a grey for its black and a purple for its pale yellow: told apart
# with any colour vision.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7B5EA7")
ENDINGS = ("png", "pdf", "svg")
DASHES = ("-", "--", ":", "-.")
WIDE = (8.0, 4.5)
PANEL = (4.2, 3.4)
MOST_SWITCHES = 200  # more lines than that are a grey block


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the ending of the path decides the format."""
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix.removeprefix("."))


def over_time(section: Section, key: str) -> "Figure":
    """One measure over the stream, one line per method."""
    return panels(section, [key], size=WIDE)


def task_maps(section: Section) -> "Figure":
    """Accuracy on every task over time, one map per method."""
    groups = [g for g in section.groups if any(run.recorded is not None for run in g.runs)]
    _need(groups, section, "evaluations")
    columns = 2 if len(groups) == 4 else min(len(groups), 3)
    rows = -(-len(groups) // columns)
    figure = _blank((PANEL[0] * columns, 0.6 + 2.6 * rows))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for axes, group in zip(grid.flat, groups, strict=False):
        values = task_accuracy_map(group, section.tasks, bins=24)
        image = axes.imshow(
            values,
            aspect="auto",
            cmap="cividis",
            vmin=0,
            vmax=1,
            interpolation="nearest",
            extent=(0, section.tasks, section.tasks + 0.5, 0.5),
        )
        axes.set_title(group.label, fontsize=10)
    for axes in grid.flat[len(groups) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("task")
        _whole_numbers(axes.yaxis)
    for axes in grid.flat[max(0, len(groups) - columns) : len(groups)]:  # the lowest of its column
        axes.set_xlabel("tasks done")
        axes.tick_params(labelbottom=True)
        _whole_numbers(axes.xaxis)
    figure.colorbar(image, ax=grid, label="accuracy", shrink=0.8)
    return figure


def sensitivity(section: Section) -> "Figure":
    """Final accuracy and time over T (lines: p, the share of the memory a refresh uses).

    The paper's numbers, where it has the benchmark, are drawn hollow.
    """
    found = _by_refresh(section)
    _need(found, section, "runs of lpr-er with different refresh.every or refresh.samples")
    figure = _blank((2 * PANEL[0], PANEL[1]))
    left, right = figure.subplots(1, 2)
    intervals = sorted({every for points in found.values() for every in points})
    for (share, points), colour in zip(sorted(found.items()), COLOURS[1:], strict=False):
        every = sorted(points)
        accuracy = [estimate(np.array(points[t][0])) for t in every]
        means, errors = ([getattr(e, k) for e in accuracy] for k in ("mean", "standard_error"))
        style: dict[str, Any] = {"color": colour, "marker": "o"}
        left.errorbar(
            every, means, np.nan_to_num(errors), capsize=3, label=f"p = {share:g}", **style
        )
        timed = [(t, float(np.mean(points[t][1]))) for t in every if points[t][1]]
        if timed:
            right.plot(*zip(*timed, strict=True), label=f"p = {share:g}", **style)
        theirs = paper_sensitivity(section.benchmark, share)
        if theirs:
            style |= {"linestyle": ":", "markerfacecolor": "none"}
            left.plot(*zip(*theirs, strict=True), label=f"p = {share:g}, paper", **style)
            intervals = sorted({*intervals, *(t for t, _ in theirs)})
    for axes, title in ((left, "Acc"), (right, "minutes of learning")):
        axes.set_xscale("log")
        axes.set_xticks(intervals, [str(t) for t in intervals])
        axes.minorticks_off()
        axes.set_xlabel("T: stream batches between refreshes")
        axes.set_title(title, fontsize=10)
        _tidy(axes)
    _legend(figure, left)
    return figure


# How they are drawn ------------------------------------------------------------------------------


def _blank(size: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def panels(
    section: Section,
    keys: Sequence[str],
    columns: int | None = None,
    size: tuple[float, float] = PANEL,
) -> "Figure":
    """Several measures side by side, one legend for all."""
    columns = columns or len(keys)
    rows = -(-len(keys) // columns)
    figure = _blank((size[0] * columns, size[1] * rows))
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, key in zip(grid, keys, strict=True):
        measure = BY_KEY[key]
        drawn = curves(section, measure) if section.tasks else []
        _need(drawn, section, f"records for '{measure.label.lower()}'")
        _draw(axes, measure, drawn, section.tasks)
    _legend(figure, grid[0])
    return figure


def _draw(axes: "Axes", measure: Measure, drawn: Sequence[Curve], tasks: int) -> None:
    for curve in drawn:
        turn, i = divmod(curve.index, len(COLOURS))
        colour, dash = COLOURS[i], DASHES[turn % len(DASHES)]
        axes.plot(curve.x, curve.mean, dash, color=colour, linewidth=1.8, label=curve.label)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    if measure.x == "tasks":
        for switch in range(1, tasks) if tasks <= MOST_SWITCHES else ():
            axes.axvline(switch, color="0.8", linewidth=0.7, zorder=0)
        axes.set_xlim(0, tasks)
        axes.set_xlabel("tasks done")
        _whole_numbers(axes.xaxis)
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel("minutes of learning")
    lowest = min(float(np.nanmin(curve.low)) for curve in drawn)
    if lowest >= 0 and (measure.scale == "amount" or lowest < 0.25):
        axes.set_ylim(bottom=0)
    axes.set_title(measure.label, fontsize=11)
    _tidy(axes)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def _legend(figure: "Figure", axes: "Axes") -> None:
    """Below the plots, where it hides nothing, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    room = max(1, int(figure.get_figwidth() * 11 / (max(map(len, labels)) + 6)))
    columns = min(len(labels), room)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _need(found: object, section: Section, what: str) -> None:
    if not found:
        raise DataError(f"{section.title}: no {what}; there is nothing to draw.")


def _by_refresh(section: Section) -> dict[float, dict[int, tuple[list[float], list[float]]]]:
    """P -> T -> (accuracies, minutes) of the complete lpr-er runs."""
    found: dict[float, dict[int, tuple[list[float], list[float]]]] = {}
    for group in section.groups:
        if group.method == "lpr-er" and group.complete:
            samples, every = (group.settings[f"refresh.{k}"] for k in ("samples", "every"))
            whole = samples is None or section.memory is None
            share = 1.0 if whole else round(min(1.0, samples / section.memory), 3)
            accuracies, minutes = found.setdefault(share, {}).setdefault(int(every), ([], []))
            accuracies += group.values("acc").values()
            minutes += group.values("minutes").values()
    kept = {p: {t: v for t, v in points.items() if v[0]} for p, points in found.items()}
    several = len(kept) > 1 or any(len(points) > 1 for points in kept.values())
    return kept if several else {}


# What there is to draw ---------------------------------------------------------------------------

_WHOLE = ("variation_seen", "variation_loss", "accuracy", "loss")
_PREQUENTIAL = ("prequential", "prequential_fading", "regret_majority", "regret_no_change")
FIGURES: Mapping[str, Callable[[Section], "Figure"]] = {
    "accuracy": partial(over_time, key="accuracy"),
    "worst-case": partial(over_time, key="wc_acc"),
    "variation": partial(over_time, key="variation_seen"),
    "loss": partial(over_time, key="loss"),
    "drift": partial(over_time, key="drift"),
    "time": partial(over_time, key="time"),
    "tasks": task_maps,
    "prequential": partial(panels, keys=_PREQUENTIAL, columns=2),
    "gradients": partial(panels, keys=("ratio_replay", "ratio_new")),
    "sensitivity": sensitivity,
    # as in the paper; the appendix is about all tasks seen, figure 1 about the first one
    "figure-1": partial(panels, keys=("drift", "variation_first", "first_task")),
    "figure-2": partial(panels, keys=("ratio_replay", "ratio_new")),
    "appendix": partial(panels, keys=_WHOLE, columns=2),
}
