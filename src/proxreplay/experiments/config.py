"""One typed configuration of a run: frozen dataclasses that check themselves.

It is resolved from defaults < benchmark < method < file < ``--set``; unknown keys are refused with
the nearest valid name, and earlier names of keys are still read.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import yaml

from proxreplay.data.scenarios import SHORT_LAST, Blurry, ShortLast
from proxreplay.errors import DataError, InputError
from proxreplay.options import (
    Amount,
    AveragingOptions,
    CompanionOptions,
    Count,
    DistillationOptions,
    FloorOptions,
    KroneckerOptions,
    LearnerOptions,
    LossOptions,
    LPROptions,
    Options,
    ProjectionOptions,
    RefreshOptions,
    Share,
    StepOptions,
    at_least,
    at_most,
    count,
    one_of,
)

MAX_THREADS = 1024
MAX_FILE_BYTES = 2**20  # of a file of settings
SCENARIOS = ("class", "domain", "blurry", "iid", None)
_SIGNED = "# sha256 of these settings: "
_SECTIONS = {"stream", "loss", "lpr", "refresh", "projection", "diagnostics"}  # of every run's file


@dataclass(frozen=True)
class StreamSettings(Options, prefix="stream."):
    """Where the examples come from and in which order; None is what the benchmark says.

    Args:
        data: custom: a folder or zip of images, or an .npz file.
        scenario: class, domain, blurry or iid.
        tasks: how many.
        disjoint: blurry: share of classes that stay within one task.
        blur: blurry: share of the other classes' examples that arrive in other tasks.
        short_last: a task's last batch, if short: buffer_only (remembered), train or drop.
        first: only the first so many tasks arrive; none for all.
        limit: examples of each task that arrive; none for all.
        image_size: custom: side of the stored images.
        augment: custom: crop; true for crop and mirror; false; none to choose by the data.
    """

    data: str | None = None
    scenario: Annotated[str | None, partial(one_of, SCENARIOS)] = None
    tasks: Count | None = None
    disjoint: Share = Blurry.disjoint
    blur: Share = Blurry.blur
    short_last: Annotated[str, partial(one_of, typing.get_args(ShortLast))] = SHORT_LAST
    first: Count | None = None
    limit: Count | None = None
    image_size: Count | None = None
    augment: Annotated[bool | str | None, partial(one_of, ("crop", True, False, None))] = None


@dataclass(frozen=True)
class DiagnosticsSettings(Options, prefix="diagnostics."):
    """What is recorded in addition; it costs time and changes nothing else about a run.

    Args:
        drift: representation drift of task 1 at every SGD step, as in paper or by the authors.
        gradients_every: SGD steps between gradient ratios.
        spectrum: of every layer's shrinkage, at the end.
        prequential: predict every stream batch before it is learned.
    """

    drift: Annotated[str | None, partial(one_of, ("paper", "authors", None))] = None
    gradients_every: Count | None = None
    spectrum: bool = False
    prequential: bool = False


@dataclass(frozen=True)
class RunConfig(Options):
    """Everything that decides what a run computes.

    Args:
        benchmark: see `proxreplay benchmarks`.
        method: see `proxreplay methods`.
        seed: of everything random.
        lr: learning rate, eta in the paper.
        capacity: examples remembered; none for no limit.
        batch_size: examples per stream batch.
        replay_batch: remembered examples per step.
        steps_per_batch: SGD steps per stream batch, S in the paper.
        eval_every: stream batches between evaluations.
        test: whether the test examples are evaluated, at the end.
        threads: CPU threads; the same number gives the same bits.
        device: such as cpu or cuda.
        compile: the training step by torch.compile, which changes the last bits.
        sharded: whether each of several processes keeps a part of the memory only (docs/scale.md).
        network: a name such as mlp, or package.module:name, or file.py:name; none for the
            benchmark's own.
    """

    benchmark: str
    method: str
    seed: Annotated[int, partial(at_least, 0), partial(at_most, 2**63 - 1)] = 0
    lr: Amount = LearnerOptions.lr
    capacity: Count | None = LearnerOptions.capacity
    batch_size: Count = LearnerOptions.batch_size
    replay_batch: Count = LearnerOptions.replay_batch
    steps_per_batch: Count = LearnerOptions.steps_per_batch
    eval_every: Count = 1
    test: bool = True
    threads: Annotated[int, partial(count, 1), partial(at_most, MAX_THREADS)] = 1
    device: str = "cpu"
    compile: bool = False
    sharded: bool = False
    network: str | None = None
    stream: StreamSettings = field(default_factory=StreamSettings)
    loss: LossOptions = field(default_factory=LossOptions)
    averaging: AveragingOptions = field(default_factory=AveragingOptions)
    # only methods that ask for one have a companion
    companion: CompanionOptions = field(default_factory=lambda: CompanionOptions(weight=0.0))
    distillation: DistillationOptions = field(default_factory=DistillationOptions)
    # runs that do not say so acted at every step; `configure` settles it for new ones
    lpr: LPROptions = field(default_factory=lambda: LPROptions(per="step"))
    klpr: KroneckerOptions = field(default_factory=KroneckerOptions)
    refresh: RefreshOptions = field(default_factory=RefreshOptions)
    step: StepOptions = field(default_factory=StepOptions)
    projection: ProjectionOptions = field(default_factory=ProjectionOptions)
    floor: FloorOptions = field(default_factory=FloorOptions)
    diagnostics: DiagnosticsSettings = field(default_factory=DiagnosticsSettings)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """The same with some values replaced: by dotted keys (``lpr.omega_0``), or nested."""
        result = self
        for key, value in renamed(values)[0].items():
            result = _replace(result, key.split("."), value, key)
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, ready for YAML or JSON."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        return _flatten(self.to_dict())

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


class _Loader(yaml.SafeLoader):
    """Reads no anchors: a few lines of them can stand for more than fits into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("anchors and aliases are not read; write the values out")
        return super().compose_node(parent, index)


def parse_value(text: str) -> Any:
    """A value as YAML reads it: a number, true, null, a word, a list."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{text!r} cannot be read as a YAML value: {error}") from error


def dump_settings(values: Mapping[str, Any]) -> str:
    """Settings as YAML, below a comment with their checksum."""
    text = yaml.safe_dump(values, sort_keys=False)
    return f"{_SIGNED}{_checksum(yaml.safe_load(text))}\n{text}"


def _checksum(values: Any) -> str:
    """Of what settings say, not of how they are laid out."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def of_a_run(path: Path, values: Mapping[str, Any]) -> bool:
    """Whether a file of settings was written by a run, or is an edited copy of such a file."""
    with path.open(encoding="utf-8") as file:
        signed = file.read(len(_SIGNED)) == _SIGNED
    return "method" in values and (signed or {*values} >= _SECTIONS)


def read_settings(path: Path, *, unchanged: bool = False) -> dict[str, Any]:
    """The settings in a YAML file, as nested mappings.

    ``unchanged`` refuses settings that are not those of the checksum above them, if there is one.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a file; give a YAML file of settings.")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise DataError(f"{path}: more than {MAX_FILE_BYTES:,} characters; not settings.")
        values = yaml.load(text, _Loader)
        signed = text.partition("\n")[0].strip()
        changed = signed.startswith(_SIGNED) and signed != _SIGNED + _checksum(values)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: holds no configuration; give a mapping of keys to values.")
    if unchanged and changed:
        raise DataError(
            f"{path}: its settings are not those that the run wrote, by the checksum in its first "
            "line. Undo the change, or make a run of its own with --config; remove the first line "
            "only if you know that the settings are right."
        )
    return values


@functools.cache
def keys() -> tuple[str, ...]:
    """Every key that a configuration has, dotted.

    >>> "lpr.omega_0" in keys()
    True
    """
    return tuple(RunConfig("", "").flat())


def described(settings: type[Any] = RunConfig, prefix: str = "") -> dict[str, str]:
    """What every key means, from the Args of its dataclass.

    >>> described()["averaging.momentum"]
    'decay of the moving average per step; its horizon is 1 / (1 - momentum) steps.'
    """
    texts: dict[str, str] = {}
    for line in (inspect.getdoc(settings) or "").partition("Args:\n")[2].splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon and name.isidentifier():
            texts[prefix + name] = text
        else:  # the line above goes on
            texts[[*texts][-1]] += f" {line.strip()}"
    for name, hint in typing.get_type_hints(settings).items():
        if dataclasses.is_dataclass(hint):
            texts |= described(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
    return texts


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


UNSET = {"refresh.samples": ("none", "all")}  # words for a value that is not there; else none


def _coerce(value: Any, hint: Any, key: str) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if union else (hint,)
    if type(value) is int and value.bit_length() > 1023:  # no float, nor printed by Python
        raise InputError(f"{key} has {value.bit_length()} bits; give a number below 1e307.")
    if type(None) in options and value in (None, *UNSET.get(key, ("none",))):
        return None
    if type(value) in options:
        return value
    if float in options and type(value) in (int, str):  # YAML reads 1e-3 as a string
        with contextlib.suppress(ValueError):
            return float(value)
    expected = " or ".join("none" if o is type(None) else o.__name__ for o in options)
    raise InputError(f"{key}={value!r} is a {type(value).__name__}; give {expected}.")
