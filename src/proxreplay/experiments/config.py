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


@dataclass(frozen=True)
class LPRSettings:
    """Layerwise Proximal Replay."""

    omega_0: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        _at_least(0, **{"lpr.omega_0": self.omega_0, "lpr.beta": self.beta})


@dataclass(frozen=True)
class RefreshSettings:
    """When and from how much of the memory a rule is refreshed."""

    every: int = 10  # T in the paper, in stream batches
    samples: int | None = None  # n in the paper; None is the whole memory

    def __post_init__(self) -> None:
        _at_least(1, **{"refresh.every": self.every, "refresh.samples": self.samples})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    benchmark: str
    method: str
    seed: int = 0
    lr: float = 0.1  # eta in the paper
    memory: int = 2000
    batch_size: int = 10
    replay_batch: int = 10
    steps_per_batch: int = 3  # S in the paper
    eval_every: int = 1  # stream batches
    lpr: LPRSettings = field(default_factory=LPRSettings)
    refresh: RefreshSettings = field(default_factory=RefreshSettings)

    def __post_init__(self) -> None:
        _at_least(0, seed=self.seed, lr=self.lr)
        _at_least(
            1,
            memory=self.memory,
            batch_size=self.batch_size,
            replay_batch=self.replay_batch,
            steps_per_batch=self.steps_per_batch,
            eval_every=self.eval_every,
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


def _coerce(value: Any, hint: Any, key: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) in options or (value is None and type(None) in options):
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
