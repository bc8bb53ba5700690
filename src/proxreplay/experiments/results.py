"""Run folders on disk: what a run writes, and how it is read again.

A run folder is plain: ``config.yaml`` (the resolved configuration), ``environment.json`` (versions,
commit, data checksum, hardware), ``records.jsonl`` (append-only, one event a line),
``timings.jsonl`` (seconds; kept apart because they differ from machine to machine while the records
are bit-identical), ``result.json`` (once complete), ``failure.txt`` (if the run broke), ``log.txt``
and ``checkpoint/``. docs/run-folder.md describes every line.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from proxreplay.errors import DataError, ProxreplayError
from proxreplay.evaluation import (
    Trajectory,
    average_anytime_accuracy,
    final_accuracy,
    worst_case_accuracy,
)
from proxreplay.experiments.config import RunConfig, read_settings

Record = dict[str, Any]
Status = Literal["complete", "incomplete", "failed", "broken"]


@dataclass(frozen=True)
class Result:
    """What a finished run amounts to.

    Args:
        acc: mean test accuracy over tasks at the end; None if test examples were not looked at.
        aaa: average anytime accuracy on validation examples.
        wc_acc: worst-case accuracy on validation examples.
        validation_acc: mean validation accuracy over tasks at the end; tuning selects by it.
        test_accuracy: at the end, one a task.
        eval_every: stream batches between evaluations; WC-Acc is optimistic if above 1.
        online: acc, aaa and wc_acc of the online network where an average is what predicts.
    """

    acc: float | None
    aaa: float
    wc_acc: float
    validation_acc: float
    test_accuracy: list[float]
    eval_every: int
    online: dict[str, float | None] | None = None


def evaluations(
    records: Iterable[Record], split: str = "validation", *, online: bool = False
) -> list[Record]:
    """The evaluation records of one split; ``online`` asks for the network behind an average."""
    wanted = [r for r in records if r["kind"] == "evaluation" and r["split"] == split]
    return [r for r in wanted if bool(r.get("online")) == online]


def trajectory(
    records: Iterable[Record], measure: str = "accuracy", *, online: bool = False
) -> Trajectory:
    """Validation accuracies (or losses) over time."""
    moments = evaluations(records, online=online)
    width = max((len(r[measure]) for r in moments), default=0)
    values = np.full((len(moments), width), np.nan)
    for row, record in zip(values, moments, strict=True):
        row[: len(record[measure])] = record[measure]
    positions, tasks = ([r[key] for r in moments] for key in ("position", "task"))
    return Trajectory(np.array(positions), np.array(tasks), values)


def _measures(records: Sequence[Record], *, online: bool) -> dict[str, Any]:
    path = trajectory(records, online=online)
    test = evaluations(records, "test", online=online)
    return {
        "acc": final_accuracy(np.array(test[-1]["accuracy"])) if test else None,
        "aaa": average_anytime_accuracy(path),
        "wc_acc": worst_case_accuracy(path),
    }


def summarise(records: Sequence[Record], eval_every: int) -> Result:
    """The paper's measures of one run."""
    return Result(
        **_measures(records, online=False),
        validation_acc=final_accuracy(np.array(evaluations(records)[-1]["accuracy"])),
        test_accuracy=[a for r in evaluations(records, "test") for a in r["accuracy"]],
        eval_every=eval_every,
        online=_measures(records, online=True) if evaluations(records, online=True) else None,
    )


@dataclass(frozen=True)
class StoredRun:
    """A run folder as it is found on disk, whatever state it is in.

    Args:
        folder: where it is.
        status: ``complete``; ``incomplete`` (may be resumed); ``failed`` (stopped by an error);
            ``broken`` (its files cannot be read).
        problem: for failed and broken runs, what is wrong.
        config: None if broken.
        result: None unless complete.
    """

    folder: Path
    status: Status
    problem: str | None = None
    config: RunConfig | None = None
    result: Result | None = None

    @cached_property
    def records(self) -> list[Record]:
        """Every event recorded so far; a line cut off by a kill is left out."""
        return read_lines(self.folder / "records.jsonl")

    @cached_property
    def timings(self) -> list[Record]:
        """Seconds spent, as recorded."""
        return read_lines(self.folder / "timings.jsonl")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, commit, data checksum and hardware."""
        path = self.folder / "environment.json"
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def read_run(folder: Path) -> StoredRun:
    """Read a run folder; a damaged one is told as ``broken``, not raised."""
    try:
        config = read_config(folder / "config.yaml")
        if (folder / "result.json").exists():
            values = json.loads((folder / "result.json").read_text("utf-8"))
            known = {f.name for f in fields(Result)}
            result = Result(**{k: v for k, v in values.items() if k in known})
            return StoredRun(folder, "complete", config=config, result=result)
    except (OSError, ValueError, TypeError, AttributeError, ProxreplayError) as error:
        return StoredRun(folder, "broken", problem=f"{type(error).__name__}: {error}")
    failure = folder / "failure.txt"
    if failure.exists():
        return StoredRun(folder, "failed", failure.read_text("utf-8", "replace").strip(), config)
    return StoredRun(folder, "incomplete", config=config)


def find_runs(folders: Iterable[Path]) -> list[StoredRun]:
    """Every run at or below the given folders, in order of path."""
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; give a run folder or one that holds some.")
        found |= {path.parent for path in folder.rglob("config.yaml")}
    return [read_run(folder) for folder in sorted(found)]


def read_config(path: Path) -> RunConfig:
    """The configuration in a YAML file."""
    return RunConfig("", "").with_values(read_settings(path))


def read_lines(path: Path) -> list[Record]:
    """The records in a file of JSON lines; an unfinished last line is left out."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write_text(path: Path, text: str) -> None:
    """Write a whole file or, if interrupted, leave the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_result(path: Path, result: Result) -> None:
    """``result.json``."""
    write_text(path, json.dumps(asdict(result), indent=2) + "\n")
