"""Tuning as in the paper: by final validation accuracy on one seed, never looking at test data.

LPR is tuned on top of the baseline: first the method alone over its own grid, then LPR's strength
with everything else as selected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.engines import Job
from proxreplay.experiments.jobs import Grid
from proxreplay.experiments.recipes import LPR_PREFIX, find_method
from proxreplay.experiments.results import read_run
from proxreplay.files import write_text

_PAPER: dict[str, list[Any]] = {
    "lr": [0.01, 0.05, 0.1],
    "loss.replay_weight": [0.1, 0.5, 1.0],
    "loss.logit_weight": [0.1, 0.5, 1.0],
    "averaging.momentum": [0.99, 0.995, 0.999],
    "loss.rho": [0.0, 0.05, 0.1],
    "lpr.omega_0": [0.04, 0.25, 1.0, 4.0, 100.0],
    "lpr.beta": [1.0, 2.0],
}


def paper_grid(method_name: str) -> Grid:
    """The paper's grid for a method: the learning rate and what else it has to choose."""
    method = find_method(method_name)
    return {key: values for key, values in _PAPER.items() if key == "lr" or key in method.uses}


@dataclass(frozen=True)
class Stage:
    """One grid over one method; its winner is what the next stage starts from."""

    method: str  # what is run
    grid: Grid  # values to try, by key


def stages(method_name: str, grid: Grid | None) -> list[Stage]:
    """What to tune one after the other; ``grid=None`` is the paper's way."""
    if grid is not None:
        return [Stage(method_name, grid)]
    full = paper_grid(method_name)
    if not method_name.startswith(LPR_PREFIX):
        return [Stage(method_name, full)]
    base = method_name.removeprefix(LPR_PREFIX)
    on_top = {key: values for key, values in full.items() if key.startswith("lpr.")}
    return [Stage(base, paper_grid(base)), Stage(method_name, on_top)]


@dataclass(frozen=True)
class Choice:
    """A tried configuration and the validation accuracy it ended with."""

    config: RunConfig
    validation_acc: float


def ranked(jobs: Sequence[Job]) -> list[Choice]:
    """Completed runs, best first; of equals, the one tried first."""
    results = [(job.config, read_run(job.folder).result) for job in jobs]
    choices = [Choice(config, found.validation_acc) for config, found in results if found]
    return sorted(choices, key=lambda choice: -choice.validation_acc)


def winner_values(choice: Choice, stage: Stage) -> dict[str, Any]:
    """The winning point of a stage's grid, by key."""
    flat = choice.config.flat()
    return {key: flat[key] for key in stage.grid}


def write_winner(path: Path, values: Mapping[str, Any], choice: Choice, stage_count: int) -> None:
    """A file for ``--config`` with what was selected, and a line on how."""
    text = (
        f"# Selected by final validation accuracy ({choice.validation_acc:.4f}) on seed "
        f"{choice.config.seed} of {choice.config.benchmark}, {choice.config.method}; "
        f"stages: {stage_count}.\n"
    )
    write_text(path, text + yaml.safe_dump(dict(values), sort_keys=False))
