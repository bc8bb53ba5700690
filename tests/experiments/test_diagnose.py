"""Diagnostics look at a run and leave it as it is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from proxreplay import prequential
from proxreplay.cli import app
from proxreplay.errors import InputError
from proxreplay.experiments.build import build_learner, build_stream
from proxreplay.experiments.configure import configure, declared
from proxreplay.experiments.results import Record, read_run
from proxreplay.experiments.run import RunOptions, run
from proxreplay.report.grouping import read_study
from proxreplay.report.page import render
from proxreplay.report.plots import FIGURES
from tests.experiments.test_run import QUICK, contents, interrupted

ALL = {
    "diagnostics.drift": "paper",
    "diagnostics.gradients_every": 7,
    "diagnostics.spectrum": True,
    "diagnostics.prequential": True,
}


def plain(folder: Path) -> list[Record]:
    kinds = ("train", "evaluation", "refresh")
    return [r for r in read_run(folder).records if r["kind"] in kinds]


@pytest.mark.parametrize("method", ["lpr-er", "lpr-der", "lpr-lode", "lpr-ema"])
def test_a_run_is_bit_identical_with_and_without(method: str, tmp_path: Path) -> None:
    run(configure("split-digits", method, QUICK), tmp_path / "without")
    run(configure("split-digits", method, QUICK, ALL), tmp_path / "with")
    assert plain(tmp_path / "with") == plain(tmp_path / "without")
    results = [read_run(tmp_path / name).result for name in ("without", "with")]
    bare = [replace(found, records_sha256=None) for found in results if found is not None]
    assert bare[0] == bare[1]
    kinds = {r["kind"] for r in read_run(tmp_path / "with").records}
    looked = {"drift", "gradient", "spectrum", "prequential", "recall"}
    assert kinds == {"train", "evaluation", "refresh", *looked}


def test_they_survive_an_interruption(tmp_path: Path) -> None:
    config = configure("split-digits", "lpr-er", QUICK, ALL)
    run(config, tmp_path / "whole")
    for at in (13, 52):
        interrupted(config, tmp_path / "parts", at, RunOptions(checkpoint_every=10))
    run(config, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_prequential_numbers_of_data_of_your_own_are_reported(tmp_path: Path) -> None:
    X, y = load_digits(return_X_y=True)
    np.savez(tmp_path / "mine.npz", X=(X[:300] / 16).astype(np.float32), y=y[:300])
    options = ["--data", str(tmp_path / "mine.npz"), "--tasks", "5", "--prequential"]
    options += ["--method", "er", "--set", "steps_per_batch=1", "--eval-every", "50"]
    made = CliRunner().invoke(app, ["run", "custom", *options, "--out", str(tmp_path / "run")])
    assert made.exit_code == 0, made.output
    records = read_run(tmp_path / "run").records
    steps = [record for record in records if record["kind"] == "prequential"]
    *_, last = steps
    assert len(steps) == len({record["position"] for record in steps}) > 10
    (recall,) = [record["recall"] for record in records if record["kind"] == "recall"]
    shares = [value for _, value in recall]
    assert len(shares) == 10
    assert min(shares) >= 0
    assert last["accuracy"] == pytest.approx(_recomputed(tmp_path, last["examples"]))
    (section,) = read_study([tmp_path / "run"]).sections
    figure = FIGURES["prequential"](section)
    assert [axes.get_title() for axes in figure.axes[:2]] == [
        "Prequential accuracy",
        "Prequential accuracy, of late",
    ]
    page = render(read_study([tmp_path / "run"]))
    assert "Regret, no change" in page


def _recomputed(tmp_path: Path, examples: int) -> float:
    """The same by `prequential`, on the stream of the run and a learner made as the run's."""
    config = read_run(tmp_path / "run").config
    assert config is not None
    benchmark = declared(config)
    dataset = benchmark.load(None)
    stream = build_stream(config, benchmark, dataset)
    learner = build_learner(config, benchmark, dataset, stream, [])
    *_, last = prequential(learner, stream)
    assert last.examples == examples
    return last.accuracy


def test_ratios_of_agem_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = configure("split-digits", "er-agem", QUICK, {"diagnostics.gradients_every": 2})
    with pytest.raises(InputError, match="A-GEM compares with a gradient that it takes after"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
