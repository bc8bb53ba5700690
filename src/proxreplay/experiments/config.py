"""One typed configuration of a run: frozen dataclasses that check themselves.

It is resolved from defaults < benchmark < method < file < ``--set``; unknown keys are refused with
the nearest valid name, and earlier names of keys are still read.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from proxreplay.errors import DataError, InputError
from proxreplay.options import (
    AveragingOptions,
    LearnerOptions,
    LossOptions,
    LPROptions,
    ProjectionOptions,
    RefreshOptions,
    at_least,
    one_of,
)


@dataclass(frozen=True)
class StreamSettings:
    """Where the examples come from and in which order; None is what the benchmark says."""

    data: str | None = None  # custom: a folder or zip of images, or an .npz file
    scenario: str | None = None  # class, domain, blurry or iid
    tasks: int | None = None
    disjoint: float = 0.5  # blurry: share of classes that stay within one task
    blur: float = 0.1  # blurry: share of the other classes' examples that stray
    short_last: str = "buffer_only"
    first: int | None = None  # only so many tasks arrive; None for all
    limit: int | None = None  # examples of each task that arrive; None for all
    image_size: int | None = None  # custom: side of the stored images
    augment: bool | str | None = None  # custom: crop; true for crop and mirror; None by the data

    def __post_init__(self) -> None:
        one_of(("class", "domain", "blurry", "iid", None), **{"stream.scenario": self.scenario})
        one_of(("buffer_only", "train", "drop"), **{"stream.short_last": self.short_last})
        if isinstance(self.augment, str):
            one_of(("crop",), **{"stream.augment": self.augment})
        at_least(1, **{"stream.tasks": self.tasks, "stream.image_size": self.image_size})
        at_least(1, **{"stream.limit": self.limit, "stream.first": self.first})
        at_least(0, **{"stream.disjoint": self.disjoint, "stream.blur": self.blur})


@dataclass(frozen=True)
class DiagnosticsSettings:
    """What is looked at while the run goes on; it costs time and changes nothing else."""

    drift: str | None = None  # paper or authors: representation drift of task 1, every SGD step
    gradients_every: int | None = None  # SGD steps between gradient ratios
    spectrum: bool = False  # of every layer's shrinkage, at the end

    def __post_init__(self) -> None:
        one_of(("paper", "authors", None), **{"diagnostics.drift": self.drift})
        at_least(1, **{"diagnostics.gradients_every": self.gradients_every})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    benchmark: str
    method: str
    seed: int = 0
    lr: float = LearnerOptions.lr
    capacity: int | None = LearnerOptions.capacity  # examples remembered; None: no limit
    batch_size: int = 10
    replay_batch: int = LearnerOptions.replay_batch
    steps_per_batch: int = LearnerOptions.steps_per_batch
    eval_every: int = 1  # stream batches
    test: bool = True  # whether the test examples are looked at, at the end
    threads: int = 1  # the same number gives the same bits, whatever else is running
    device: str = "cpu"
    compile: bool = False  # the training step by torch.compile, whose last bits are others
    network: str | None = None  # import path of a network; None for the benchmark's own
    stream: StreamSettings = field(default_factory=StreamSettings)
    loss: LossOptions = field(default_factory=LossOptions)
    averaging: AveragingOptions = field(default_factory=AveragingOptions)
    lpr: LPROptions = field(default_factory=LPROptions)
    refresh: RefreshOptions = field(default_factory=RefreshOptions)
    projection: ProjectionOptions = field(default_factory=ProjectionOptions)
    diagnostics: DiagnosticsSettings = field(default_factory=DiagnosticsSettings)

    def __post_init__(self) -> None:
        at_least(0, seed=self.seed, lr=self.lr)
        at_least(
            1,
            capacity=self.capacity,
            batch_size=self.batch_size,
            replay_batch=self.replay_batch,
            steps_per_batch=self.steps_per_batch,
            eval_every=self.eval_every,
            threads=self.threads,
        )

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """The same configuration with some values replaced.

        Args:
            values: dotted keys such as ``lpr.omega_0``, or nested mappings.
        """
        result = self
        for key, value in renamed(values)[0].items():
            result = _replace(result, key.split("."), value, key)
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, ready for YAML or JSON."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        return {key: operator.attrgetter(key)(self) for key in keys()}

    @property
    def digest(self) -> str:
        """Names this configuration: two runs with the same digest compute the same."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_EARLIER_KEYS = {"memory": "capacity", "ema.momentum": "averaging.momentum"}
_EARLIER_VALUES = {("diagnostics.drift", "official"): "authors"}


def renamed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values by dotted key under today's names, and one remark for each earlier name.

    >>> renamed({"ema": {"momentum": 0.9}})
    ({'averaging.momentum': 0.9}, ["'ema.momentum' is now called 'averaging.momentum'"])
    """
    result: dict[str, Any] = {}
    remarks = []
    for key, value in _flatten(values).items():
        name = _EARLIER_KEYS.get(key, key)
        if name != key:
            remarks.append(f"'{key}' is now called '{name}'")
        if isinstance(value, str) and (name, value) in _EARLIER_VALUES:
            remarks.append(f"{name}={value} is now called {_EARLIER_VALUES[name, value]}")
            value = _EARLIER_VALUES[name, value]
        if name in result:
            raise InputError(f"'{key}' is given twice, once as '{name}'; give only '{name}'.")
        result[name] = value
    if result.get("benchmark", "custom") != "custom" and result.get("stream.augment") is True:
        del result["stream.augment"]  # the earlier default, which only 'custom' looks at
    return result, remarks


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _NoAnchors(yaml.SafeLoader):
    """Refuses references: a few of them inside each other stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("anchors are not read; write their values out.")
        return super().compose_node(parent, index)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, as nested mappings."""
    try:
        values = yaml.load(path.read_text("utf-8"), _NoAnchors)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: holds no configuration; give a mapping of keys to values.")
    return values


@functools.cache
def keys(settings: type[Any] = RunConfig, prefix: str = "") -> tuple[str, ...]:
    """Every key that a configuration has, dotted.

    >>> "lpr.omega_0" in keys()
    True
    """
    hints = typing.get_type_hints(settings)
    names: list[str] = []
    for f in dataclasses.fields(settings):
        if dataclasses.is_dataclass(hints[f.name]):
            names += keys(hints[f.name], f"{prefix}{f.name}.")
        else:
            names.append(prefix + f.name)
    return tuple(names)


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """The keys in which two configurations differ, with both values."""
    first, second = a.flat(), b.flat()
    differing = [key for key in first if first[key] != second[key]]
    return [f"{key}: {first[key]} there, {second[key]} here" for key in differing]


def _replace(settings: Any, path: list[str], value: Any, key: str) -> Any:
    hints = typing.get_type_hints(type(settings))
    name, *rest = path
    if name not in hints or bool(rest) != dataclasses.is_dataclass(hints[name]):
        near = difflib.get_close_matches(key, keys(), n=1, cutoff=0.0)
        raise InputError(f"unknown key '{key}'; the nearest valid one is '{near[0]}'.")
    if rest:
        value = _replace(getattr(settings, name), rest, value, key)
    else:
        value = _coerce(value, hints[name], key)
    return dataclasses.replace(settings, **{name: value})


_UNSET = {"refresh.samples": ("none", "all")}  # words for a value that is not there


def _coerce(value: Any, hint: Any, key: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and value in (None, *_UNSET.get(key, ("none",))):
        return None
    if type(value) in options:
        return value
    if float in options and type(value) is int:
        return float(value)
    if float in options and isinstance(value, str):
        # YAML reads 1e-3 as a string.
        try:
            return float(value)
        except ValueError:
            pass
    expected = " or ".join("none" if o is type(None) else o.__name__ for o in options)
    raise InputError(f"{key}={value!r} is a {type(value).__name__}; give {expected}.")
