"""Trackers: thin adapters that hand a run's records on to TensorBoard, W&B or MLflow.

Nothing here is imported unless a tracker is asked for, and a tracker changes nothing about a run.
Each attempt at a run hands its trackers all records from the beginning, in place of what earlier
attempts handed over. ``tracked.json`` in the run's folder knows which tracker has them all.
"""

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from proxreplay.errors import DataError, InputError
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.results import (
    Record,
    predictor_of,
    read_json,
    read_lines,
    records_digest,
)
from proxreplay.files import write_text

log = logging.getLogger(__name__)


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers in a record that are worth a curve.

    >>> list(scalars({"kind": "train", "position": 3, "task": 0, "loss": 0.5}))
    [('train/loss', 0.5)]
    """
    if record["kind"] == "train":
        yield "train/loss", record["loss"]
    if record["kind"] == "evaluation":
        name = predictor_of(record)
        prefix = record["split"] + (f"-{name}" if name else "")
        for measure in ("accuracy", "loss"):
            values = record[measure]
            yield f"{prefix}/{measure}", sum(values) / len(values)
            for task, value in enumerate(values):
                yield f"{prefix}-tasks/{measure}/{task}", value


@dataclass
class Tracker:
    """Hands numbers on with the stream batch they belong to; the end belongs to the last one."""

    log: Callable[[str, float, int], object]  # takes the name of a curve, a number, the batch
    # nothing more will come in this attempt; is told whether the run is complete
    close: Callable[[bool], object]
    identity: str | None = None  # what a later attempt needs to go on with the same curves
    position: int = 0

    def write(self, record: Record) -> None:
        """Take one record."""
        self.position = record.get("position", self.position)
        for name, value in scalars(record):
            self.log(name, value, self.position)


def tensorboard(config: RunConfig, folder: Path, identity: str | None) -> Tracker:
    """Event files in the run's folder; those of earlier attempts are hidden by ``purge_step``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0)
    return Tracker(writer.add_scalar, lambda complete: writer.close())


def wandb(config: RunConfig, folder: Path, identity: str | None) -> Tracker:
    """A W&B run named after the folder; WANDB_MODE=offline keeps it on disk."""
    import wandb

    run = wandb.init(
        project="proxreplay",
        name=folder.name,
        id=identity or secrets.token_hex(4),  # a later attempt replaces this one
        dir=str(folder),
        config=config.to_dict(),
    )
    return Tracker(
        lambda name, value, step: run.log({name: value, "batch": step}),
        lambda complete: run.finish(exit_code=0 if complete else 1),
        run.id,
    )


def mlflow(config: RunConfig, folder: Path, identity: str | None) -> Tracker:
    """An MLflow run named after the folder; MLFLOW_TRACKING_URI says where it goes.

    A later attempt goes on with the same MLflow run and adds only what is not there.
    """
    from mlflow import MlflowClient
    from mlflow.entities import LifecycleStage, RunStatus
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    try:
        run = client.get_run(identity) if identity else None
    except MlflowException:  # of another server, or deleted for good
        run = None
    there: set[tuple[str, int]] = set()
    if run is not None and run.info.lifecycle_stage == LifecycleStage.ACTIVE:
        client.update_run(run.info.run_id, RunStatus.to_string(RunStatus.RUNNING))
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            there |= {(name, metric.step) for metric in history}
    else:
        experiment = client.get_experiment_by_name("proxreplay")
        group = experiment.experiment_id if experiment else client.create_experiment("proxreplay")
        run = client.create_run(group, run_name=folder.name)
        for key, value in config.flat().items():
            client.log_param(run.info.run_id, key, value)
    key = run.info.run_id

    def add(name: str, value: float, step: int) -> None:
        if (name, step) not in there:
            client.log_metric(key, name, value, step=step)

    def close(complete: bool) -> None:
        status = RunStatus.FINISHED if complete else RunStatus.KILLED
        client.set_terminated(key, RunStatus.to_string(status))

    return Tracker(add, close, key)


TRACKERS: Mapping[str, Callable[[RunConfig, Path, str | None], Tracker]] = {
    make.__name__: make for make in (tensorboard, wandb, mlflow)
}


class Tracking:
    """The trackers of one attempt at a run; ``earlier`` is what earlier attempts recorded.

    A tracker that fails is given up with a warning, and the run goes on: `hand_over` can hand the
    tracker everything later.
    """

    def __init__(
        self, names: Iterable[str], config: RunConfig, folder: Path, earlier: Iterable[Record]
    ) -> None:
        self._folder = folder
        self._trackers: dict[str, Tracker] = {}
        self._complete: str | None = None
        self.problems: dict[str, Exception] = {}
        for name in dict.fromkeys(names):
            identity = _read_tracked(folder).get(name, {}).get("identity")
            try:
                self._trackers[name] = TRACKERS[name](config, folder, identity)
            except Exception as error:
                raise InputError(f"tracker '{name}' could not start: {error}") from error
        self._note()
        for record in earlier if self._trackers else ():
            self.write(record)

    def __enter__(self) -> Self:
        return self

    def write(self, record: Record) -> None:
        """Hand one record to every tracker."""
        self._each(lambda tracker: tracker.write(record))

    def complete(self, records_sha256: str) -> None:
        """Every record of the run has been handed over."""
        self._complete = records_sha256

    def __exit__(self, *_: object) -> None:
        self._each(lambda tracker: tracker.close(self._complete is not None))
        self._note()

    def _each(self, do: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:
                log.warning("tracker '%s' failed and gets no more records: %r", name, error)
                self.problems[name] = error
                del self._trackers[name]

    def _note(self) -> None:
        if self._trackers:
            noted = _read_tracked(self._folder)
            for name, tracker in self._trackers.items():
                noted[name] = {"identity": tracker.identity, "records_sha256": self._complete}
            write_text(self._folder / "tracked.json", json.dumps(noted, indent=2) + "\n")


def missing(folder: Path, names: Iterable[str] = ()) -> list[str]:
    """Trackers without all records of a complete run: of ``names``, or of those it ever had."""
    known = _read_tracked(folder)
    wanted = list(names) or [name for name in known if name in TRACKERS]
    digest = records_digest(folder) if wanted else None
    return [n for n in wanted if known.get(n, {}).get("records_sha256", "") != digest]


def hand_over(config: RunConfig, folder: Path, names: Sequence[str]) -> None:
    """Hand a complete run's records to those of the named trackers that do not have them all."""
    wanted = missing(folder, names) if names else []
    if not wanted:
        return
    digest = records_digest(folder)
    if digest is None:
        raise DataError(f"{folder}: records.jsonl is missing; trackers were handed nothing.")
    with Tracking(wanted, config, folder, read_lines(folder / "records.jsonl")) as tracking:
        tracking.complete(digest)
    for name, problem in tracking.problems.items():
        raise DataError(f"{folder}: tracker '{name}' was not handed all records: {problem!r}")


def _read_tracked(folder: Path) -> dict[str, dict[str, Any]]:
    """What ``tracked.json`` says; a damaged one is as if it were not there."""
    try:
        found = read_json(folder / "tracked.json", missing={})
    except DataError as error:
        log.warning("%s", error)
        return {}
    return {name: value for name, value in found.items() if isinstance(value, dict)}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist or are not installed, before any work is done."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"unknown tracker '{name}'; there are {', '.join(TRACKERS)}.")
        if find_spec(name) is None:
            raise InputError(f"tracker '{name}' is not installed: pip install 'proxreplay[{name}]'")
