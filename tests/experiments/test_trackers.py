"""Trackers are handed the records of a run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxreplay.cli import app
from proxreplay.errors import DataError, InputError
from proxreplay.experiments import trackers
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.configure import configure
from proxreplay.experiments.results import Record, evaluations, read_lines, read_run
from proxreplay.experiments.run import RunOptions, run
from tests.experiments.test_run import interrupted

CONFIG = configure("split-digits", "er", {"steps_per_batch": 1, "eval_every": 20})


def expected(folder: Path) -> dict[int, float]:
    """Mean validation accuracy by stream batch, from the records."""
    found = evaluations(read_run(folder).records)
    return {r["position"]: sum(r["accuracy"]) / len(r["accuracy"]) for r in found}


def tensorboard_curve(folder: Path, name: str) -> list[tuple[int, float]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_curve_once_even_after_an_interruption(tmp_path: Path) -> None:
    options = RunOptions(track=("tensorboard",), checkpoint_every=30)
    interrupted(CONFIG, tmp_path, 50, options)
    interrupted(CONFIG, tmp_path, 70, RunOptions())  # not tracked, and yet in the curve
    run(CONFIG, tmp_path, options)
    curve = tensorboard_curve(tmp_path, "validation/accuracy")
    assert curve == [(step, pytest.approx(v)) for step, v in expected(tmp_path).items()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_finished_run_hands_over_what_a_tracker_misses(tmp_path: Path) -> None:
    """Tracked, resumed without a word about tracking, finished: the command line says so."""
    folder = tmp_path / "run"
    interrupted(CONFIG, folder, 50, RunOptions(track=("tensorboard",)))
    outcome = CliRunner().invoke(app, ["resume", str(folder)])
    hint = f"tensorboard misses records; hand them over with: proxreplay resume {folder}"
    assert hint in outcome.output
    assert tensorboard_curve(folder, "train/loss")[-1][0] == 49
    assert hint in CliRunner().invoke(app, ["resume", str(folder)]).output  # still
    before = (folder / "result.json").read_bytes(), (folder / "records.jsonl").read_bytes()
    for words in ("complete", "complete, and so are its trackers"):  # once is enough
        outcome = CliRunner().invoke(app, ["resume", str(folder), "--track", "tensorboard"])
        assert outcome.exit_code == 0
        assert f"{folder}: {words}\n" in outcome.output
        curve = tensorboard_curve(folder, "train/loss")
        losses = [r for r in read_lines(folder / "records.jsonl") if r["kind"] == "train"]
        assert curve == [(r["position"], pytest.approx(r["loss"])) for r in losses]
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert before == (
        (folder / "result.json").read_bytes(),
        (folder / "records.jsonl").read_bytes(),
    )


class Heard:
    """A tracker that keeps what it was told; it fails after so many records."""

    identity = "7"

    def __init__(self, most: int) -> None:
        self.records: list[Record] = []
        self.ended: bool | None = None
        self._most = most

    def write(self, record: Record) -> None:
        if len(self.records) == self._most:
            raise ConnectionError("no route")
        self.records.append(record)

    def close(self, complete: bool) -> None:
        self.ended = complete


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Heard]:
    """What each attempt's ``mlflow`` was told; the first attempt's fails after 20 records."""
    made: list[Heard] = []

    def make(config: RunConfig, folder: Path, identity: str | None) -> Heard:
        assert identity == ("7" if made else None)
        made.append(Heard(10**9 if made else 20))
        return made[-1]

    monkeypatch.setattr(trackers, "TRACKERS", {"mlflow": make})
    return made


def test_a_tracker_that_fails_stops_no_run_and_is_told_everything_later(
    tmp_path: Path, heard: list[Heard]
) -> None:
    run(CONFIG, tmp_path, RunOptions(track=("mlflow",)))
    assert trackers.missing(tmp_path) == ["mlflow"]
    assert "tracker 'mlflow' failed" in (tmp_path / "log.txt").read_text()
    for _ in range(2):
        run(CONFIG, tmp_path, RunOptions(track=("mlflow", "mlflow")))
        assert trackers.missing(tmp_path) == []
    records = read_lines(tmp_path / "records.jsonl")
    assert [(h.records, h.ended) for h in heard] == [(records[:20], None), (records, True)]


def test_damaged_records_are_not_handed_over(tmp_path: Path, heard: list[Heard]) -> None:
    run(CONFIG, tmp_path)
    (tmp_path / "tracked.json").write_text("{")
    records = tmp_path / "records.jsonl"
    records.write_text(records.read_text().replace("0.", "1.", 1))
    with pytest.raises(DataError, match="not as the run wrote it"):
        run(CONFIG, tmp_path, RunOptions(track=("mlflow",)))
    records.unlink()
    with pytest.raises(DataError, match="is missing; trackers were handed nothing"):
        run(CONFIG, tmp_path, RunOptions(track=("mlflow",)))
    assert not heard


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_one_curve_in_a_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())

    def stored() -> list[tuple[str, str]]:
        experiment = client.get_experiment_by_name("proxreplay")
        found = client.search_runs([experiment.experiment_id])
        return [(run.info.run_id, run.info.status) for run in found]

    tracked = RunOptions(track=("mlflow",), checkpoint_every=30)
    interrupted(CONFIG, tmp_path / "run", 50, tracked)
    assert [status for _, status in stored()] == ["KILLED"]
    for options in (RunOptions(), tracked, tracked):
        run(CONFIG, tmp_path / "run", options)
    ((identity, status),) = stored()
    history = client.get_metric_history(identity, "validation/accuracy")
    assert [m.step for m in history] == list(expected(tmp_path / "run"))
    assert {m.step: m.value for m in history} == pytest.approx(expected(tmp_path / "run"))
    assert client.get_run(identity).data.params["method"] == "er"
    assert status == "FINISHED"
    assert json.loads((tmp_path / "run" / "tracked.json").read_text())["mlflow"]["identity"]


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
