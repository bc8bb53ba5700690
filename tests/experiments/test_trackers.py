"""Trackers are handed the records of a run."""

from pathlib import Path

import pytest

from proxreplay.errors import InputError
from proxreplay.experiments.configure import configure
from proxreplay.experiments.results import evaluations, read_run
from proxreplay.experiments.run import RunOptions, run
from tests.experiments.test_run import interrupted

CONFIG = configure("split-digits", "er", {"steps_per_batch": 1, "eval_every": 20})


def expected(folder: Path) -> dict[int, float]:
    """Mean validation accuracy by stream batch, from the records."""
    found = evaluations(read_run(folder).records)
    return {r["position"]: sum(r["accuracy"]) / len(r["accuracy"]) for r in found}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_curve_once_even_after_an_interruption(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = RunOptions(track=("tensorboard",), checkpoint_every=30)
    interrupted(CONFIG, tmp_path, 50, options)
    interrupted(CONFIG, tmp_path, 70, RunOptions())  # not tracked, and yet in the curve
    run(CONFIG, tmp_path, options)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = {e.step: e.value for e in events.Scalars("validation/accuracy")}
    assert curve.keys() == expected(tmp_path).keys()
    for step, value in expected(tmp_path).items():
        assert curve[step] == pytest.approx(value)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_the_curve_in_a_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    run(CONFIG, tmp_path / "run", RunOptions(track=("mlflow",)))
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("proxreplay")
    (stored,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(stored.info.run_id, "validation/accuracy")
    assert {m.step: m.value for m in history} == pytest.approx(expected(tmp_path / "run"))
    assert stored.data.params["method"] == "er"


@pytest.mark.filterwarnings("ignore")
def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    run(CONFIG, folder, RunOptions(track=("wandb",)))
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert b"validation/accuracy" in log.read_bytes()


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown tracker 'tensorbord'; there are tensorboard"):
        run(CONFIG, tmp_path / "run", RunOptions(track=("tensorbord",)))
    assert not (tmp_path / "run").exists()
