"""Trackers: thin adapters that hand a run's records on to TensorBoard, W&B or MLflow.

Nothing here is imported unless a tracker is asked for, and a tracker changes nothing about a run.
Each attempt at a run starts its trackers anew and hands them all records from the beginning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from proxreplay.errors import InputError
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.results import Record, predictor_of


class Tracker(Protocol):
    """Takes records as they are written."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


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


class _Stepped:
    """Hands numbers on with the stream batch they belong to; the end belongs to the last one."""

    def __init__(self, log: Callable[[str, float, int], object], close: Callable[[], None]) -> None:
        self._log = log
        self._close = close
        self._position = 0

    def write(self, record: Record) -> None:
        self._position = record.get("position", self._position)
        for name, value in scalars(record):
            self._log(name, value, self._position)

    def close(self) -> None:
        self._close()


def tensorboard(config: RunConfig, folder: Path) -> Tracker:
    """Event files in the run's folder; those of earlier attempts are hidden by ``purge_step``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0)
    return _Stepped(writer.add_scalar, writer.close)


def wandb(config: RunConfig, folder: Path) -> Tracker:
    """A W&B run named after the folder; WANDB_MODE=offline keeps it on disk."""
    import wandb

    run = wandb.init(
        project="proxreplay",
        name=folder.name,
        id=config.digest,  # a later attempt replaces this one
        dir=str(folder),
        config=config.to_dict(),
    )
    return _Stepped(lambda name, value, step: run.log({name: value, "batch": step}), run.finish)


def mlflow(config: RunConfig, folder: Path) -> Tracker:
    """An MLflow run named after the folder; MLFLOW_TRACKING_URI says where it goes."""
    from mlflow import MlflowClient
    from mlflow.entities import RunStatus

    client = MlflowClient()
    experiment = client.get_experiment_by_name("proxreplay")
    identity = experiment.experiment_id if experiment else client.create_experiment("proxreplay")
    run = client.create_run(identity, run_name=folder.name)
    for key, value in config.flat().items():
        client.log_param(run.info.run_id, key, value)

    def close() -> None:
        client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.FINISHED))

    return _Stepped(
        lambda name, value, step: client.log_metric(run.info.run_id, name, value, step=step), close
    )


TRACKERS: Mapping[str, Callable[[RunConfig, Path], Tracker]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist or are not installed, before any work is done."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"unknown tracker '{name}'; there are {', '.join(TRACKERS)}.")
        if find_spec(name) is None:
            raise InputError(f"tracker '{name}' is not installed: pip install 'proxreplay[{name}]'")
