"""One typed configuration of a run: frozen dataclasses that check themselves.

It is resolved from defaults < benchmark < method < file < ``--set``; unknown keys are refused with
the nearest valid name.
"""

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from proxreplay.errors import InputError


def _at_least(lower: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not lower <= value < float("inf"):
            raise InputError(f"{name}={value}; give a finite number of at least {lower}.")


def _one_of(options: tuple[str | None, ...], **values: str | None) -> None:
    for name, value in values.items():
        if value not in options:
            known = ", ".join("none" if o is None else o for o in options)
            raise InputError(f"{name}={value}; give one of {known}.")


@dataclass(frozen=True)
class LPRSettings:
    """Layerwise Proximal Replay."""

    omega_0: float = 1.0
    beta: float = 1.0
    tolerance: float = 0.05  # on Lambda in wide layers (docs/speed.md); 0 is exact
    rolling: float = 0.0  # how much of earlier statistics stays at a refresh; 0 is none
    reference: str = "paper"  # authors: BatchNorm's statistic as in the released code

    def __post_init__(self) -> None:
        _one_of(("paper", "authors"), **{"lpr.reference": self.reference})
        _at_least(0, **{"lpr.omega_0": self.omega_0, "lpr.beta": self.beta})
        for name, value, limit in (
            ("tolerance", self.tolerance, 0.5),
            ("rolling", self.rolling, 1),
        ):
            if not 0 <= value < limit:
                raise InputError(f"lpr.{name}={value}; give at least 0 and less than {limit:g}.")


@dataclass(frozen=True)
class ProjectionSettings:
    """The other gradient rules; each takes those it knows."""

    samples: int = 200  # A-GEM: remembered examples behind the reference gradient
    alpha: float | None = None  # OWM, AOP: a constant; None for AOP's own schedule, 1e-3 for OWM
    energy: float = 0.97  # GPM, SGP: share of the Gram's trace that the basis holds
    scale: float = 10.0  # SGP: how fast importance saturates
    norms: str = "plain"  # what happens to normalisation layers
    head: str = "treat"  # OWM, AOP, GPM, SGP: free leaves the head to the plain gradient

    def __post_init__(self) -> None:
        _at_least(1, **{"projection.samples": self.samples})
        _at_least(0, **{"projection.alpha": self.alpha, "projection.scale": self.scale})
        if not 0 < self.energy <= 1:
            raise InputError(f"projection.energy={self.energy}; give more than 0 and at most 1.")
        _one_of(("plain", "treat", "freeze"), **{"projection.norms": self.norms})
        _one_of(("treat", "free"), **{"projection.head": self.head})


@dataclass(frozen=True)
class RefreshSettings:
    """When and from what a rule is refreshed.

    Every so many stream batches from the memory; or, with ``every="task"`` and for GPM and SGP, at
    the end of every task from the examples of that task, beside what is closed already.
    """

    every: int | str = 10  # T in the paper, in stream batches; or "task"
    samples: int | None = None  # n in the paper; None is the whole memory, or the whole task

    def __post_init__(self) -> None:
        _at_least(1, **{"refresh.samples": self.samples})
        if isinstance(self.every, int):
            _at_least(1, **{"refresh.every": self.every})
        elif self.every != "task":
            raise InputError(
                f"refresh.every={self.every}; give a number of stream batches, or task."
            )

    @property
    def interval(self) -> int | None:
        """Stream batches between refreshes; None for the ends of tasks."""
        return self.every if isinstance(self.every, int) else None


@dataclass(frozen=True)
class LossSettings:
    """Weights inside the replay losses; each loss takes those it knows."""

    alpha: float = 0.5  # ER-ACE: share of the incoming batch
    rho: float = 0.1  # LODE: how hard new classes push old ones down
    replay_weight: float = 1.0  # DER: of the replayed cross-entropy
    logit_weight: float = 1.0  # DER: of the distance between logits
    teacher_every: int = 10  # DER as in the paper: stream batches between snapshots

    def __post_init__(self) -> None:
        _at_least(0, **{f"loss.{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)})
        _at_least(1, **{"loss.teacher_every": self.teacher_every})


@dataclass(frozen=True)
class EMASettings:
    """Averaging of the weights."""

    momentum: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"ema.momentum={self.momentum}; give at least 0 and less than 1.")


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
    augment: bool = True  # custom: random crops and mirroring

    def __post_init__(self) -> None:
        _one_of(("class", "domain", "blurry", "iid", None), **{"stream.scenario": self.scenario})
        _one_of(("buffer_only", "train", "drop"), **{"stream.short_last": self.short_last})
        _at_least(1, **{"stream.tasks": self.tasks, "stream.image_size": self.image_size})
        _at_least(1, **{"stream.limit": self.limit, "stream.first": self.first})
        _at_least(0, **{"stream.disjoint": self.disjoint, "stream.blur": self.blur})


@dataclass(frozen=True)
class DiagnosticsSettings:
    """What is looked at while the run goes on; it costs time and changes nothing else."""

    drift: str | None = None  # paper or official: representation drift of task 1, every SGD step
    gradients_every: int | None = None  # SGD steps between gradient ratios
    spectrum: bool = False  # of every layer's shrinkage, at the end

    def __post_init__(self) -> None:
        _one_of(("paper", "official", None), **{"diagnostics.drift": self.drift})
        _at_least(1, **{"diagnostics.gradients_every": self.gradients_every})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    benchmark: str
    method: str
    seed: int = 0
    lr: float = 0.1  # eta in the paper
    memory: int | None = 2000  # None: without limit
    batch_size: int = 10
    replay_batch: int = 10
    steps_per_batch: int = 3  # S in the paper
    eval_every: int = 1  # stream batches
    test: bool = True  # whether the test examples are looked at, at the end
    threads: int = 1  # the same number gives the same bits, whatever else is running
    device: str = "cpu"
    compile: bool = False  # the training step by torch.compile, whose last bits are others
    network: str | None = None  # import path of a network; None for the benchmark's own
    stream: StreamSettings = field(default_factory=StreamSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    ema: EMASettings = field(default_factory=EMASettings)
    lpr: LPRSettings = field(default_factory=LPRSettings)
    refresh: RefreshSettings = field(default_factory=RefreshSettings)
    projection: ProjectionSettings = field(default_factory=ProjectionSettings)
    diagnostics: DiagnosticsSettings = field(default_factory=DiagnosticsSettings)

    def __post_init__(self) -> None:
        _at_least(0, seed=self.seed, lr=self.lr)
        _at_least(
            1,
            memory=self.memory,
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
        for key, value in _flatten(values).items():
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


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def keys(settings: type[Any] = RunConfig, prefix: str = "") -> list[str]:
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
    return names


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
