"""Run folders on disk: what a run writes, and the one reader of it.

docs/run-folder.md describes every file and every line. `read_run` tells the state of a folder;
`StoredRun.with_records` adds what was recorded, as arrays. Damage never raises: the run is
``broken``, and its problem says which file is wrong and how.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from proxreplay.errors import DataError, ProxreplayError
from proxreplay.evaluation import Trajectory, final_accuracy
from proxreplay.evaluation.measures import MAIN, numbers
from proxreplay.evaluation.trajectory import Recorded, Series
from proxreplay.experiments.config import RunConfig, read_settings
from proxreplay.experiments.configure import averaging_named
from proxreplay.files import file_digest, unsigned

Record = dict[str, Any]
Status = Literal["complete", "incomplete", "failed", "broken"]
Numbers = dict[str, float | None]

# What a run folder may hold at most: a report is also made of folders from elsewhere.
FILE_BYTES = {"records.jsonl": 2**28, "timings.jsonl": 2**24}
OTHER_BYTES = 2**20
MOST_TASKS = 10_000
MOST_CELLS = 2 * 10**7  # moments times tasks


@dataclass(frozen=True)
class Result:
    """What a finished run amounts to."""

    # the main measures by key (see `proxreplay.evaluation.MEASURES`); None where test examples
    # would be needed and were not evaluated
    measures: Numbers
    validation_acc: float  # mean validation accuracy over tasks at the end; tuning selects by it
    test_accuracy: list[float]  # at the end, one per task
    eval_every: int  # stream batches between evaluations; WC-Acc is optimistic if above 1
    # the main measures of the run's other networks, by name, such as online where an average of
    # the weights predicts
    predictors: dict[str, Numbers] = field(default_factory=dict)
    records_sha256: str | None = None  # of records.jsonl; None for runs of version 0.1

    def to_json(self) -> dict[str, Any]:
        """As in ``result.json``: ``online`` has a key of its own since the first version."""
        others = {name: found for name, found in self.predictors.items() if name != "online"}
        return {
            **self.measures,
            "validation_acc": self.validation_acc,
            "test_accuracy": self.test_accuracy,
            "eval_every": self.eval_every,
            "online": self.predictors.get("online"),
            **({"predictors": others} if others else {}),
            **({"records_sha256": self.records_sha256} if self.records_sha256 else {}),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Result":
        """The inverse of `to_json`; keys that are not known are left out."""
        online = {"online": values["online"]} if values.get("online") else {}
        return cls(
            _main_numbers(values),
            float(values["validation_acc"]),
            [float(a) for a in values["test_accuracy"]],
            int(values["eval_every"]),
            {k: _main_numbers(v) for k, v in (online | values.get("predictors", {})).items()},
            values.get("records_sha256"),
        )


def _main_numbers(values: Mapping[str, Any]) -> Numbers:
    found = {m.key: values.get(m.key) for m in MAIN}
    return {key: None if value is None else float(value) for key, value in found.items()}


# From records to numbers -------------------------------------------------------------------------


def predictor_of(record: Record) -> str | None:
    """Which network an evaluation judged; None for the one that predicts."""
    name: str | None = record.get("predictor", "online" if record.get("online") else None)
    return name


def evaluations(
    records: Iterable[Record], split: str = "validation", predictor: str | None = None
) -> list[Record]:
    """The evaluation records of one split and one predictor."""
    wanted = [r for r in records if r["kind"] == "evaluation" and r["split"] == split]
    return [r for r in wanted if predictor_of(r) == predictor]


def trajectory(
    records: Iterable[Record], of: str = "accuracy", predictor: str | None = None
) -> Trajectory:
    """Validation accuracies (or losses) over time."""
    moments = evaluations(records, predictor=predictor)
    for record in moments:
        _check_moment(record, of)
    width = max((len(r[of]) for r in moments), default=0)
    if width > MOST_TASKS or width * len(moments) > MOST_CELLS:
        raise DataError(
            f"{len(moments):,} evaluations of up to {width:,} tasks; at most {MOST_TASKS:,} tasks "
            f"and {MOST_CELLS:,} numbers are read."
        )
    values = np.full((len(moments), width), np.nan)
    for row, record in zip(values, moments, strict=True):
        row[: len(record[of])] = record[of]
    positions, tasks = ([r[key] for r in moments] for key in ("position", "task"))
    return Trajectory(np.array(positions), np.array(tasks), values)


def _check_moment(record: Record, of: str) -> None:
    """Refuse an evaluation that no run writes, before memory is taken for it."""
    position, task, values = record["position"], record["task"], record[of]
    if type(position) is not int or not 0 <= position < 2**53:
        raise DataError(f"an evaluation at position {position!r:.40}; give a stream batch.")
    if type(task) is not int or task + 1 != len(values):
        raise DataError(
            f"the evaluation at position {position} is of task {task!r:.40} with {len(values):,} "
            f"numbers of {of}; there must be one for every task so far."
        )
    if of == "accuracy" and not all(0 <= value <= 1 for value in values):
        raise DataError(f"the evaluation at position {position} has an accuracy outside 0 to 1.")


def recorded(records: Sequence[Record]) -> Recorded:
    """What measures are computed from; there must be at least one evaluation."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    judged = kinds.get("evaluation", [])
    others = dict.fromkeys(predictor_of(r) for r in judged if r["split"] == "validation")
    test = evaluations(judged, "test")
    has_loss = all("loss" in r for r in evaluations(judged))
    return Recorded(
        trajectory(judged),
        trajectory(judged, "loss") if has_loss else None,
        np.array(test[-1]["accuracy"]) if test else None,
        {name: trajectory(judged, predictor=name) for name in others if name is not None},
        _series(kinds.get("drift", []), lambda r: {"total": r["total"], **r["layers"]}),
        _series(
            kinds.get("gradient", []), lambda r: {k: r.get(k) for k in ("new", "replay", "all")}
        ),
        _series(
            kinds.get("prequential", []),
            lambda r: {**{k: r[k] for k in ("accuracy", "fading", "kappa")}, **r["regret"]},
        ),
        share=_series(
            [r for r in kinds.get("refresh", []) if "share" in r], lambda r: {"share": r["share"]}
        ),
    )


def _series(records: Sequence[Record], values: Callable[[Record], dict[str, Any]]) -> Series | None:
    if not records:
        return None
    rows = [values(r) for r in records]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Series(
        np.array([r["position"] for r in records], dtype=np.float64),
        {name: np.array(column, dtype=np.float64) for name, column in columns.items()},
    )


def summarise(records: Sequence[Record], eval_every: int) -> Result:
    """The main measures of one run."""
    others = dict.fromkeys(predictor_of(r) for r in records if r["kind"] == "evaluation")
    test = evaluations(records, "test")
    return Result(
        numbers(recorded(records), MAIN),
        final_accuracy(np.array(evaluations(records)[-1]["accuracy"])),
        [accuracy for record in test for accuracy in record["accuracy"]],
        eval_every,
        {name: _of_predictor(records, name) for name in others if name is not None},
    )


def _of_predictor(records: Sequence[Record], name: str) -> Numbers:
    test = evaluations(records, "test", name)
    accuracy = np.array(test[-1]["accuracy"]) if test else None
    return numbers(Recorded(trajectory(records, predictor=name), test=accuracy), MAIN)


# Folders -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredRun:
    """A run folder as it is found on disk, whatever state it is in."""

    folder: Path  # where it is
    # complete; incomplete (may be resumed); failed (stopped by an error); broken
    # (its files cannot be read)
    status: Status
    problem: str | None = None  # what is wrong, if anything is
    config: RunConfig | None = None  # None if it cannot be read
    result: Result | None = None  # None unless complete
    # what was recorded so far; None before the first evaluation, for a run kept without its
    # records, and until `with_records` was called
    recorded: Recorded | None = None
    # layers that the rule leaves alone, with the reason
    untreated: Mapping[str, str] = field(default_factory=dict)
    # versions, commit, data checksum and hardware
    environment: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def records(self) -> list[Record]:
        """Every event recorded so far; a line cut off by a kill is left out."""
        return read_lines(self.folder / "records.jsonl")

    @cached_property
    def measures(self) -> dict[str, float]:
        """Every measure of a complete run that it has, by key; empty for others."""
        if self.result is None:
            return {}
        computed = {} if self.recorded is None else numbers(self.recorded)
        values = {**computed, **self.result.measures}
        return {key: v for key, v in values.items() if v is not None and np.isfinite(v)}

    def with_records(self) -> "StoredRun":
        """The same run with what it recorded; only what reports need is kept in memory."""
        if self.status == "broken":
            return self
        try:
            return self._read_records()
        except Exception as error:  # whatever a file can hold, the other runs are still reported
            return StoredRun(self.folder, "broken", _problem("records.jsonl", error), self.config)

    def check_records(self) -> None:
        """Raise a DataError if the records of a complete run are not those that it wrote.

        They may be missing: a result is also kept without them.
        """
        path = self.folder / "records.jsonl"
        known = None if self.result is None else self.result.records_sha256
        if known is not None and path.exists() and records_digest(self.folder) != known:
            raise DataError(
                "records.jsonl is not as the run wrote it (result.json holds another SHA-256). "
                "Put it back from a copy, remove it to keep the result without its curve, or "
                f"remove {self.folder} to make the run again."
            )

    def _read_records(self) -> "StoredRun":
        path = self.folder / "records.jsonl"
        records = read_lines(path, skip=b'{"kind": "train"')  # half of the lines, not reported
        if self.status == "complete" and path.exists() and not evaluations(records):
            raise DataError("the run is complete but holds no evaluations")
        untreated = [r["untreated"] for r in records if r["kind"] == "rule" and "untreated" in r]
        self.check_records()
        seconds, problem = self._seconds()
        environment, unknown = read_environment(self.folder)
        moments = evaluations(records)
        found = recorded(records) if moments else None
        self._check_end(moments)
        return replace(
            self,
            problem=self.problem or unknown or problem,
            recorded=None if found is None else replace(found, seconds=seconds),
            untreated=dict(untreated[-1]) if untreated else {},
            environment=environment,
        )

    def _check_end(self, moments: Sequence[Record]) -> None:
        """Refuse records that were cut; version 0.1 wrote no checksum of them."""
        if self.result is None or not moments:
            return
        last = final_accuracy(np.array(moments[-1]["accuracy"]))
        if not np.isclose(last, self.result.validation_acc):
            raise DataError(
                f"records.jsonl ends before the run did, with an accuracy of {last:.4f} where "
                f"result.json has {self.result.validation_acc:.4f}. Put it back from a copy, or "
                "remove it to keep the result without its curve."
            )

    def _seconds(self) -> tuple[Series | None, str | None]:
        """Timings are never a reason to leave a run out: what is wrong with them is told."""
        try:
            timings = read_timings(self.folder / "timings.jsonl")
            return _series(timings, lambda r: {k: r[k] for k in r if k != "position"}), None
        except Exception as error:
            return None, _problem("timings.jsonl", error)


def read_run(folder: Path) -> StoredRun:
    """Read the state of a run folder; a damaged one is told as ``broken``, not raised."""
    name = "config.yaml"
    if not (folder / name).exists():
        return StoredRun(folder, "broken", problem=f"{name} is missing")
    try:
        config = read_config(folder / name)
        name = "result.json"
        if (folder / name).exists():
            result = Result.from_json(read_json(folder / name))
            return StoredRun(folder, "complete", config=config, result=result)
        name = "failure.txt"
        if (folder / name).exists():
            failure = _read(folder / name).decode("utf-8", "replace").strip()
            return StoredRun(folder, "failed", failure, config)
    except Exception as error:  # whatever a file can hold
        return StoredRun(folder, "broken", problem=_problem(name, error))
    return StoredRun(folder, "incomplete", config=config)


def _problem(name: str, error: Exception) -> str:
    """One line that names the file."""
    kind = "" if isinstance(error, ProxreplayError) else f"{type(error).__name__}: "
    text = f"{kind}{error}".partition("\n")[0]
    return (text if name in text else f"{name}: {text}")[:400]


def find_runs(folders: Iterable[Path]) -> list[StoredRun]:
    """Every run at or below the given folders, once, in order of path."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; give a run folder or one that holds some.")
        for name in ("config.yaml", "records.jsonl"):
            for path in folder.rglob(name):
                found.setdefault(path.parent.resolve(), path.parent)
    return [read_run(folder) for folder in sorted(found.values())]


def read_environment(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """What a run was made with, and what is wrong with the file that says so.

    It says where a run was made, not what came of it: damage is no reason to leave the run out.
    """
    try:
        return read_json(folder / "environment.json", missing={}), None
    except (DataError, OSError) as error:
        return {}, _problem("environment.json", error)


def made_with(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a run was begun with, then every other source code that went on with it."""
    later = environment.get("continued")
    found = later if isinstance(later, list) else []  # the file may be anybody's
    return [environment, *(one for one in found if isinstance(one, Mapping))]


def records_digest(folder: Path) -> str | None:
    """SHA-256 of ``records.jsonl``; None if there is none."""
    path = folder / "records.jsonl"
    return file_digest(path, "sha256") if path.is_file() else None


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever a file of the run does."""
    found = []
    for name in ("config.yaml", "records.jsonl", "timings.jsonl", "result.json", "failure.txt"):
        with suppress(FileNotFoundError):
            status = (folder / name).stat()
            found.append((name, status.st_mtime_ns, status.st_size))
    return tuple(found)


def read_config(path: Path) -> RunConfig:
    """The configuration in a YAML file."""
    _check_file(path)
    config = RunConfig("", "").with_values(averaging_named(read_settings(path, unchanged=True)))
    json.dumps(config.to_dict())  # a number of thousands of digits can be read but not printed
    return config


def _check_file(path: Path) -> None:
    """Refuse what cannot be read in one go: pipes and devices never end."""
    if not path.is_file():
        raise DataError(f"{path.name} is not a regular file")
    size, most = path.stat().st_size, FILE_BYTES.get(path.name, OTHER_BYTES)
    if size > most:
        raise DataError(f"{path.name} has {size:,} bytes; at most {most:,} are read")


def _read(path: Path) -> bytes:
    _check_file(path)
    return path.read_bytes()


def read_json(path: Path, missing: Record | None = None) -> Record:
    """A mapping in a JSON file."""
    if missing is not None and not path.exists():
        return missing
    try:
        values = json.loads(_read(path))
    except ValueError as error:
        raise DataError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path.name}: not a mapping of keys to values")
    try:
        return unsigned(values)
    except ValueError as error:
        raise DataError(f"{path.name}: {error}") from error


def read_timings(path: Path) -> list[Record]:
    """The lines of ``timings.jsonl`` that can be read; a kill may have torn some."""
    found = []
    for line in _read(path).splitlines() if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def read_lines(path: Path, skip: bytes | None = None) -> list[Record]:
    """The records in a file of JSON lines; an unfinished last line is left out.

    Lines that begin with ``skip`` are left out, too.
    """
    records: list[Record] = []
    if not path.exists():
        return records
    _check_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or (skip and line.startswith(skip)):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                text = f"{path.name}, line {number}: not JSON: {error}"
                raise DataError(f"{text:.200} ({path})") from error
            if not isinstance(record, dict):
                raise DataError(f"{path.name}, line {number}: not a record ({path})")
            records.append(record)
    return records
