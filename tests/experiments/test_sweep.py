"""Tuning selects by validation accuracy and never looks at test data."""

from pathlib import Path

import pytest
import yaml

from proxreplay.errors import InputError
from proxreplay.experiments.engines import InlineEngine
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.jobs import grid_search
from proxreplay.experiments.results import read_run
from proxreplay.experiments.sweep import (
    Stage,
    paper_grid,
    ranked,
    stages,
    winner_values,
    write_winner,
)

QUICK = {"steps_per_batch": 1, "eval_every": 50}


def test_the_winner_has_the_highest_final_validation_accuracy(tmp_path: Path) -> None:
    stage = Stage("er", {"lr": [0.0, 0.1, 0.001]})
    jobs = grid_search("split-digits", stage.method, stage.grid, tmp_path, QUICK)
    InlineEngine().make(jobs, StopRequest())
    choices = ranked(jobs)
    last = {
        job.config.lr: [r for r in read_run(job.folder).records if r["kind"] == "evaluation"][-1]
        for job in jobs
    }
    means = {lr: sum(r["accuracy"]) / len(r["accuracy"]) for lr, r in last.items()}
    assert [c.config.lr for c in choices] == sorted(means, key=lambda lr: -means[lr])
    assert winner_values(choices[0], stage) == {"lr": 0.1}
    write_winner(tmp_path / "best.yaml", {"lr": 0.1}, choices[0], 1)
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == {"lr": 0.1}


def test_no_run_of_a_sweep_looks_at_test_examples(tmp_path: Path) -> None:
    jobs = grid_search("split-digits", "er", {"lr": [0.1]}, tmp_path, QUICK, {"test": True})
    InlineEngine().make(jobs, StopRequest())
    stored = read_run(jobs[0].folder)
    assert stored.result is not None
    assert stored.result.measures["acc"] is None
    assert all(r.get("split") != "test" for r in stored.records)


def test_lpr_is_tuned_on_top_of_the_selected_baseline() -> None:
    baseline, on_top = stages("lpr-der", None)
    assert baseline.method == "der"
    assert set(baseline.grid) == {"lr", "loss.replay_weight", "loss.logit_weight"}
    assert on_top.method == "lpr-der"
    assert on_top.grid == {
        "lpr.omega_0": [0.04, 0.25, 1.0, 4.0, 100.0],
        "lpr.beta": [1.0, 2.0],
    }
    assert paper_grid("lode")["loss.rho"] == [0.0, 0.05, 0.1]
    assert paper_grid("ema")["averaging.momentum"] == [0.99, 0.995, 0.999]


def test_an_empty_grid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty grid"):
        grid_search("split-digits", "er", {}, tmp_path)
