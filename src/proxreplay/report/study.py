"""From run folders to what a report is about: runs read once, gathered by method and benchmark."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from proxreplay.errors import DataError, ProxreplayError
from proxreplay.evaluation import (
    Trajectory,
    average_forgetting,
    backward_transfer,
    stability_gaps,
    variation_of_seen,
    variation_of_tasks,
)
from proxreplay.evaluation.metrics import Array
from proxreplay.experiments.benchmarks import BENCHMARKS
from proxreplay.experiments.config import RunConfig, StreamSettings, keys
from proxreplay.experiments.configure import configure
from proxreplay.experiments.recipes import LPR_PREFIX, METHODS
from proxreplay.experiments.results import (
    Record,
    Result,
    Status,
    StoredRun,
    find_runs,
    read_lines,
    trajectory,
)

# What decides on which machine and from which examples a run is made, not what is compared.
_NOT_COMPARED = {"seed", "threads", "device", "test", "benchmark", "method", "capacity"}
# What may differ from a benchmark's own settings in a run that stands beside the paper's numbers.
_LEFT_OPEN = {"eval_every", "refresh.every", "refresh.samples", "lpr.tolerance", "compile"}

_SectionKey = tuple[str, int | None, StreamSettings]


@dataclass(frozen=True)
class Series:
    """Numbers recorded along the stream.

    Args:
        positions: ``[J]``, stream batches from 0.
        values: ``[J]`` each, by name; NaN where one is missing.
    """

    positions: Array
    values: Mapping[str, Array]


@dataclass(frozen=True)
class Run:
    """What a report knows of one run.

    Args:
        folder: where it is.
        status: ``complete``, ``incomplete``, ``failed`` or ``broken``.
        problem: what is wrong, if anything is.
        config: None if it cannot be read.
        result: None unless complete.
        accuracy: validation accuracies over time; None if there are none yet, or the run was kept
            without its records.
        loss: validation losses over time.
        online: validation accuracies of the online network behind an average.
        drift: cumulative representation drift, by layer and ``total``, where it was recorded.
        gradients: gradient ratios of ``new``, ``replay`` and ``all``, where recorded.
        seconds: cumulative seconds by activity, after as many stream batches as ``positions``.
        remembered: the most examples a refresh was made from, where recorded.
        untreated: layers that the rule leaves alone, with the reason, where recorded.
        environment: versions and hardware.
    """

    folder: Path
    status: Status
    problem: str | None = None
    config: RunConfig | None = None
    result: Result | None = None
    accuracy: Trajectory | None = None
    loss: Trajectory | None = None
    online: Trajectory | None = None
    drift: Series | None = None
    gradients: Series | None = None
    seconds: Series | None = None
    remembered: int | None = None
    untreated: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def measures(self) -> dict[str, float]:
        """Every measure of a complete run that is one number, by name; empty for others."""
        result = self.result
        if result is None:
            return {}
        values = {
            "acc": result.acc,
            "aaa": result.aaa,
            "wc_acc": result.wc_acc,
            **({} if self.accuracy is None else self._measures_over_time(self.accuracy)),
            "minutes": self.minutes,
        }
        return {k: v for k, v in values.items() if v is not None and np.isfinite(v)}

    def _measures_over_time(self, path: Trajectory) -> dict[str, float | None]:
        gaps = stability_gaps(path)
        return {
            "forgetting": average_forgetting(path),
            "backward_transfer": backward_transfer(path),
            "variation_seen": variation_of_seen(path),
            "variation_first": float(variation_of_tasks(path)[0]),
            "variation_loss": None if self.loss is None else variation_of_seen(self.loss),
            "gap_depth": float(np.mean([g.depth for g in gaps])) if gaps else None,
            "gap_recovery": float(np.mean([g.recovery for g in gaps])) if gaps else None,
        }

    @property
    def without_records(self) -> bool:
        """Whether only its result was kept."""
        return self.status == "complete" and self.accuracy is None

    @property
    def minutes(self) -> float | None:
        """Time spent learning, refreshes included and evaluations left out."""
        if self.seconds is None:
            return None
        return float(self.learning_seconds(self.seconds)[-1]) / 60

    @staticmethod
    def learning_seconds(seconds: Series) -> Array:
        """``[J]``: seconds of learning and refreshing so far."""
        parts = [v for k, v in seconds.values.items() if k in ("learning", "refreshing")]
        total: Array = np.sum(parts, axis=0) if parts else np.zeros(len(seconds.positions))
        return total


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only.

    Args:
        label: tells the group from the others of its section.
        method: as users write it.
        settings: what was compared, by dotted key, the same for all its runs.
        runs: in order of seeds.
    """

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def complete(self) -> tuple[Run, ...]:
        """The runs that came to their end."""
        return tuple(run for run in self.runs if run.status == "complete")

    @property
    def base(self) -> str | None:
        """The method that this one puts LPR before."""
        if not self.method.startswith(LPR_PREFIX):
            return None
        return self.method.removeprefix(LPR_PREFIX)

    def values(self, measure: str) -> dict[int, float]:
        """One measure of the complete runs, by seed."""
        return {
            run.config.seed: run.measures[measure]
            for run in self.complete
            if run.config is not None and measure in run.measures
        }


@dataclass(frozen=True)
class Section:
    """Everything about one stream with one size of memory.

    Args:
        benchmark: as users write it.
        memory: examples remembered; None without limit.
        groups: methods, each with its seeds.
        changes: what the stream has other than the benchmark's own, by key.
    """

    benchmark: str
    memory: int | None
    groups: tuple[Group, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """For headings."""
        size = "unlimited memory" if self.memory is None else f"memory of {self.memory:,}"
        return ", ".join([self.benchmark, size, *(f"stream.{k}={v}" for k, v in self._changes)])

    @property
    def slug(self) -> str:
        """For file names."""
        size = "unlimited" if self.memory is None else str(self.memory)
        parts = [self.benchmark, size, *(f"{k}-{v}" for k, v in self._changes)]
        return "-".join(re.sub(r"[^\w.]+", "-", part) for part in parts)

    @property
    def _changes(self) -> list[tuple[str, Any]]:
        """For people to read: of data on a disk only the name."""
        return [(k, Path(v).name if k == "data" else v) for k, v in self.changes.items()]

    def as_in_the_paper(self, group: Group) -> bool:
        """Whether a group has the benchmark's whole stream and own settings for its method."""
        if self.changes or self.benchmark not in BENCHMARKS or group.method not in METHODS:
            return False
        own = compared(configure(self.benchmark, group.method))
        return all(group.settings[key] == own[key] for key in own.keys() - _LEFT_OPEN)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Of all groups."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def tasks(self) -> int:
        """How many tasks the longest run has begun."""
        return max((int(r.accuracy.tasks[-1]) + 1 for r in self.runs if r.accuracy), default=0)

    def base_of(self, group: Group) -> Group | None:
        """The group that an LPR group is to be compared with: same base, same settings."""
        candidates = [g for g in self.groups if g.method == group.base]
        same = [
            g for g in candidates if all(group.settings.get(k) == v for k, v in g.settings.items())
        ]
        return next(iter(same or candidates), None)


@dataclass(frozen=True)
class Study:
    """What a report is about.

    Args:
        sections: one for every benchmark and size of memory.
        lost: runs that cannot be read or have no place in a section.
    """

    sections: tuple[Section, ...]
    lost: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of them."""
        return (*(run for section in self.sections for run in section.runs), *self.lost)


def read_study(folders: Sequence[Path], cache: dict[Path, tuple[Any, Run]] | None = None) -> Study:
    """Every run at or below the folders, in whatever state it is.

    Args:
        folders: run folders, or folders that hold some.
        cache: filled with what was read; runs whose files did not change are taken from it.
    """
    runs = []
    for stored in [*find_runs(folders), *_without_config(folders)]:
        print_ = fingerprint(stored.folder)
        if cache is not None and stored.folder in cache and cache[stored.folder][0] == print_:
            runs.append(cache[stored.folder][1])
            continue
        run = read(stored)
        runs.append(run)
        if cache is not None:
            cache[stored.folder] = (print_, run)
    return gather(runs)


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever a file of the run does."""
    names = ("config.yaml", "records.jsonl", "timings.jsonl", "result.json", "failure.txt")
    found = []
    for name in names:
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            continue
        found.append((name, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _without_config(folders: Iterable[Path]) -> list[StoredRun]:
    """Folders with records but no configuration."""
    found = {p.parent for folder in folders for p in folder.rglob("records.jsonl")}
    return [
        StoredRun(folder, "broken", problem="config.yaml is missing")
        for folder in sorted(found)
        if not (folder / "config.yaml").exists()
    ]


def read(stored: StoredRun) -> Run:
    """Read one run's records once and keep what reports need; damage makes it ``broken``."""
    run = Run(stored.folder, stored.status, stored.problem, stored.config, stored.result)
    if stored.status == "broken":
        return run
    try:
        path = stored.folder / "records.jsonl"
        records = _read_records(path)
        timings = read_lines(stored.folder / "timings.jsonl")
        return _digest(run, records, timings, stored.environment, kept=path.exists())
    except (OSError, ValueError, KeyError, TypeError, ProxreplayError) as error:
        problem = f"records cannot be read: {type(error).__name__}: {error}"
        return Run(stored.folder, "broken", problem, stored.config)


def _read_records(path: Path) -> list[Record]:
    """Every record but those of training steps, which are half of the lines and not reported.

    One call of the parser for all lines, and nothing kept: a study may hold hundreds of runs.
    """
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    kept = [line for line in lines if not line.startswith('{"kind": "train"')]
    records: list[Record] = json.loads(f"[{','.join(kept)}]")
    return records


def _digest(
    run: Run,
    records: list[Record],
    timings: list[Record],
    environment: Mapping[str, Any],
    *,
    kept: bool,
) -> Run:
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    evaluated = kinds.get("evaluation", [])
    validated = [r for r in evaluated if r["split"] == "validation"]
    averaged = any(r.get("online") for r in validated)
    untreated = [r["untreated"] for r in kinds.get("rule", []) if "untreated" in r]
    remembered = [int(r["examples"]) for r in kinds.get("refresh", []) if "examples" in r]
    if run.status == "complete" and kept and not validated:
        raise DataError("the run is complete but holds no evaluations")
    return Run(
        run.folder,
        run.status,
        run.problem,
        run.config,
        run.result,
        accuracy=trajectory(evaluated) if validated else None,
        loss=trajectory(evaluated, "loss") if validated and "loss" in validated[0] else None,
        online=trajectory(evaluated, online=True) if averaged else None,
        drift=_series(kinds.get("drift", []), lambda r: {"total": r["total"], **r["layers"]}),
        gradients=_series(
            kinds.get("gradient", []), lambda r: {k: r.get(k) for k in ("new", "replay", "all")}
        ),
        seconds=_series(timings, lambda r: {k: v for k, v in r.items() if k != "position"}),
        remembered=max(remembered, default=None),
        untreated=untreated[-1] if untreated else {},
        environment=environment,
    )


def _series(records: Sequence[Record], values: Any) -> Series | None:
    if not records:
        return None
    rows = [values(r) for r in records]
    names = dict.fromkeys(name for row in rows for name in row)
    return Series(
        np.array([r["position"] for r in records], dtype=np.float64),
        {n: np.array([_number(row.get(n)) for row in rows], dtype=np.float64) for n in names},
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def gather(runs: Sequence[Run]) -> Study:
    """Runs by stream and memory, then by everything else that is compared."""
    sections: dict[_SectionKey, dict[str, list[Run]]] = {}
    lost = []
    for run in runs:
        if run.config is None or run.status == "broken":
            lost.append(run)
            continue
        key = (run.config.benchmark, run.config.capacity, run.config.stream)
        identity = json.dumps([run.config.method, compared(run.config)], sort_keys=True)
        sections.setdefault(key, {}).setdefault(identity, []).append(run)
    return Study(
        tuple(
            Section(benchmark, memory, tuple(_groups(groups.values())), _changes(stream))
            for (benchmark, memory, stream), groups in sorted(sections.items(), key=_section_order)
        ),
        tuple(lost),
    )


def _section_order(item: tuple[_SectionKey, object]) -> tuple[str, float, int, str]:
    """By benchmark, then by memory, without limit last, the benchmark's own stream first."""
    (benchmark, memory, stream), _ = item
    changes = _changes(stream)
    return benchmark, float("inf") if memory is None else memory, len(changes), str(changes)


def _changes(stream: StreamSettings) -> dict[str, Any]:
    """What a stream has other than the benchmark's own."""
    own = asdict(StreamSettings())
    return {key: value for key, value in asdict(stream).items() if value != own[key]}


def compared(config: RunConfig) -> dict[str, Any]:
    """The settings that matter to the method, by dotted key."""
    method = METHODS.get(config.method)
    return {
        key: value
        for key, value in flat(config).items()
        if key not in _NOT_COMPARED and ("." not in key or method is None or key in method.uses)
    }


def flat(config: RunConfig) -> dict[str, Any]:
    """Every value of a configuration by its dotted key."""
    return {key: functools.reduce(getattr, key.split("."), config) for key in keys()}


def label_of(method: str) -> str:
    """The method as the paper prints it, or its own name if it is unknown here."""
    return METHODS[method].label if method in METHODS else method


def _groups(found: Iterable[list[Run]]) -> list[Group]:
    """Groups with labels that say what differs between those of the same method."""
    gathered = sorted(found, key=_order)
    settings = [_settings(runs) for runs in gathered]
    methods = [_config(runs[0]).method for runs in gathered]
    groups = []
    for runs, own, method in zip(gathered, settings, methods, strict=True):
        others = [s for s, m in zip(settings, methods, strict=True) if m == method]
        varying = [k for k, v in own.items() if any(other.get(k) != v for other in others)]
        label = ", ".join([label_of(method), *(f"{k}={_short(own[k])}" for k in varying)])
        in_order = sorted(runs, key=lambda r: (_config(r).seed, str(r.folder)))
        groups.append(Group(label, method, own, tuple(in_order)))
    return groups


def _order(runs: list[Run]) -> tuple[int, int, str]:
    """Methods in the order of the catalogue, each before its LPR variant."""
    method = _config(runs[0]).method
    known = list(METHODS)
    rank = known.index(method) if method in known else len(known)
    return rank, 0, json.dumps(_settings(runs), sort_keys=True, default=str)


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    return compared(_config(runs[0]))


def _config(run: Run) -> RunConfig:
    assert run.config is not None, "broken runs are not gathered"
    return run.config


def _short(value: Any) -> str:
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
