"""Runs gathered by what is compared: sections of one stream and memory, groups of seeds."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from proxreplay.errors import DataError
from proxreplay.experiments.benchmarks import BENCHMARKS
from proxreplay.experiments.config import UNSET, RunConfig, StreamSettings
from proxreplay.experiments.configure import configure, has_effect
from proxreplay.experiments.recipes import LPR_PREFIX, METHODS
from proxreplay.experiments.results import StoredRun, find_runs, fingerprint

# What decides on which machine and from which examples a run is made, not what is compared.
_NOT_COMPARED = {"seed", "threads", "device", "test", "benchmark", "method", "capacity"}
# What may differ from a benchmark's own settings in a run that stands beside the paper's numbers.
_LEFT_OPEN = {"eval_every", "refresh.every", "refresh.samples", "lpr.tolerance", "compile"}

_SectionKey = tuple[str, int | None, StreamSettings]
Cache = dict[Path, tuple[object, StoredRun]]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str  # tells the group from the others of its section
    method: str  # as users write it
    settings: Mapping[str, Any]  # what was compared, by dotted key, the same for all its runs
    runs: tuple[StoredRun, ...]  # in order of seeds

    @property
    def complete(self) -> tuple[StoredRun, ...]:
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
    """Everything about one stream with one size of memory."""

    benchmark: str  # as users write it
    memory: int | None  # examples remembered; None without limit
    groups: tuple[Group, ...]  # methods, each with its seeds
    # what the stream has other than the benchmark's own, by key
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
        fixed = {key: value for key, value in own.items() if key not in _LEFT_OPEN}
        return fixed.items() <= group.settings.items()  # LPR without omega_0 has no beta

    @property
    def runs(self) -> tuple[StoredRun, ...]:
        """Of all groups."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def tasks(self) -> int:
        """How many tasks the longest run has begun."""
        begun = (r.recorded.accuracy.tasks[-1] for r in self.runs if r.recorded is not None)
        return max((int(task) + 1 for task in begun), default=0)

    def base_of(self, group: Group) -> Group | None:
        """The group that an LPR group is to be compared with: same base, same settings."""
        candidates = [g for g in self.groups if g.method == group.base]
        same = [
            g for g in candidates if all(group.settings.get(k) == v for k, v in g.settings.items())
        ]
        return next(iter(same or candidates), None)


@dataclass(frozen=True)
class Study:
    """What a report is about."""

    sections: tuple[Section, ...]  # one for every benchmark and size of memory
    # runs that cannot be read, and those of groups in which no run has numbers
    lost: tuple[StoredRun, ...] = ()

    @property
    def runs(self) -> tuple[StoredRun, ...]:
        """All of them."""
        return (*(run for section in self.sections for run in section.runs), *self.lost)


def read_study(folders: Sequence[Path], cache: Cache | None = None) -> Study:
    """Every run at or below the folders, in whatever state it is.

    ``cache`` is filled with what was read; runs whose files did not change are taken from it.
    """
    cache = {} if cache is None else cache
    runs = []
    for stored in find_runs(folders):
        state = fingerprint(stored.folder)
        if stored.folder not in cache or cache[stored.folder][0] != state:
            cache[stored.folder] = (state, stored.with_records())
        runs.append(cache[stored.folder][1])
    return gather(runs)


def read_some(folders: Sequence[Path], cache: Cache | None = None) -> Study:
    """As `read_study`; folders without any run are refused."""
    study = read_study(folders, cache)
    if not study.runs:
        named = ", ".join(str(folder) for folder in folders)
        raise DataError(f"{named}: no runs here; a run folder holds a config.yaml.")
    return study


def gather(runs: Sequence[StoredRun]) -> Study:
    """Runs by stream and memory, then by everything else that is compared."""
    sections: dict[_SectionKey, dict[str, list[StoredRun]]] = {}
    lost = []
    for run in runs:
        if run.config is None or run.status == "broken":
            lost.append(run)
            continue
        key = (run.config.benchmark, run.config.capacity, run.config.stream)
        identity = json.dumps([run.config.method, compared(run.config)], sort_keys=True)
        sections.setdefault(key, {}).setdefault(identity, []).append(run)
    for key, groups in list(sections.items()):
        for identity, members in list(groups.items()):
            if not any(run.result or run.recorded for run in members):
                lost += groups.pop(identity)
        if not groups:
            del sections[key]
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
    idle = _idle(config) if method is not None and "lpr.omega_0" in method.uses else ()
    return {
        key: value
        for key, value in config.flat().items()
        if key not in _NOT_COMPARED
        and not key.startswith(idle)
        and ("." not in key or method is None or key in method.uses or _of_companion(key, config))
    }


def _of_companion(key: str, config: RunConfig) -> bool:
    """Any trained method may have one."""
    return key.startswith("companion.") and has_effect(key, config)


def _idle(config: RunConfig) -> tuple[str, ...]:
    """How keys begin that do nothing to LPR with the other settings as they are, or say nothing."""
    steps = () if config.lpr.statistics == "step" else ("step.",)
    if config.lpr.omega_0 is None:
        return (*steps, "lpr.beta")
    as_ever = ("lpr.per",) if config.lpr.per == "step" else ()
    return (*steps, "lpr.level", "lpr.work", *as_ever)


def label_of(method: str) -> str:
    """The method as the paper prints it, or its own name if it is unknown here."""
    return METHODS[method].label if method in METHODS else method


def _groups(found: Iterable[list[StoredRun]]) -> list[Group]:
    """Groups with labels that say what differs between those of the same method."""
    configs = [(_config(runs[0]), runs) for runs in found]
    gathered = sorted(((c.method, compared(c), runs) for c, runs in configs), key=_order)
    groups = []
    for method, own, runs in gathered:
        others = [settings for other, settings, _ in gathered if other == method]
        varying = [k for k, v in own.items() if any(other.get(k, v) != v for other in others)]
        label = ", ".join([label_of(method), *(f"{k}={_short(k, own[k])}" for k in varying)])
        in_order = sorted(runs, key=lambda r: (_config(r).seed, str(r.folder)))
        groups.append(Group(label, method, own, tuple(in_order)))
    return groups


def _order(group: tuple[str, dict[str, Any], object]) -> tuple[int, str]:
    """Methods in the order of the catalogue, each before its LPR variant."""
    method, settings, _ = group
    known = [*METHODS, method]
    return known.index(method), json.dumps(settings, sort_keys=True, default=str)


def _config(run: StoredRun) -> RunConfig:
    assert run.config is not None, "broken runs are not gathered"
    return run.config


def _short(key: str, value: Any) -> str:
    """A value as users write it."""
    if value is None:
        return UNSET.get(key, ("none",))[-1]
    return f"{value:g}" if isinstance(value, float) else str(value)
