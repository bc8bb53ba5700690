"""Plots: legible in print and on a phone, colour-blind safe, seeds as bands."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from proxreplay.evaluation import Trajectory
from proxreplay.evaluation.metrics import Array

# Okabe and Ito's palette, dark on white first: told apart with any colour vision.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def anytime_accuracy(trajectories: Mapping[str, Sequence[Trajectory]], path: Path) -> None:
    """Accuracy over all tasks seen so far, against progress through the tasks, a line a method.

    Args:
        trajectories: label of the method -> one trajectory a seed.
        path: the picture to write; its ending decides the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    tasks = max(int(p.tasks[-1]) + 1 for paths in trajectories.values() for p in paths)
    for switch in range(1, tasks):
        axes.axvline(switch, color="0.8", linewidth=0.8, zorder=0)
    for (method, paths), colour in zip(trajectories.items(), COLOURS, strict=False):
        progress, curves = _on_common_grid(paths)
        axes.plot(progress, curves.mean(axis=0), color=colour, linewidth=2, label=method)
        low, high = curves.min(axis=0), curves.max(axis=0)
        axes.fill_between(progress, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel("tasks done (a new task begins at every thin line)")
    axes.set_ylabel("accuracy on all tasks seen")
    axes.set_xlim(0, tasks)
    axes.set_ylim(0, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower left")
    axes.set_title("Accuracy at every moment: mean over seeds, band from lowest to highest seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _on_common_grid(paths: Sequence[Trajectory], points: int = 60) -> tuple[Array, Array]:
    """Curves of seeds whose tasks differ in length, at the same points of every task.

    Returns:
        progress ``[tasks * points]`` and accuracy ``[seeds, tasks * points]``.
    """
    tasks = int(paths[0].tasks[-1]) + 1
    grid = np.arange(1, points + 1) / points
    curves = [
        np.concatenate(
            [
                np.interp(task + grid, path.progress[inside], path.seen_accuracy[inside])
                for task in range(tasks)
                for inside in [path.tasks == task]
            ]
        )
        for path in paths
    ]
    return np.concatenate([task + grid for task in range(tasks)]), np.stack(curves)
