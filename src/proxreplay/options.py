"""Options: every default stands here once, for the Python classes and for the command line alike.

Frozen dataclasses that check themselves. They import no torch, so that commands which only list or
check something answer at once. A Python class takes its defaults from here
(``omega_0: float = LPROptions.omega_0``), and a `RunConfig` holds these dataclasses as they are.
"""

import dataclasses
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from proxreplay.errors import InputError

MAX_DIM = 8192  # columns: a layer with more has no dense matrix in any rule


def at_least(lower: float, **values: float | None) -> None:
    """Refuse values below ``lower`` and values that are not finite; None passes."""
    for name, value in values.items():
        if value is not None and not (_is(Real, value) and lower <= value < float("inf")):
            raise InputError(f"{name}={value!r}; give a finite number of at least {lower}.")


def count(lower: int = 1, **values: int | None) -> None:
    """Refuse what is not a whole number of at least ``lower``; None passes."""
    for name, value in values.items():
        if value is not None and not (_is(Integral, value) and value >= lower):
            raise InputError(f"{name}={value!r}; give a whole number of at least {lower}.")


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def one_of(options: tuple[str | None, ...], **values: str | None) -> None:
    """Refuse values that are not among the options."""
    for name, value in values.items():
        if value not in options:
            known = ", ".join("none" if o is None else o for o in options)
            raise InputError(f"{name}={value}; give one of {known}.")


@dataclass(frozen=True)
class LPROptions:
    """Layerwise Proximal Replay."""

    omega_0: float = 1.0
    beta: float = 1.0
    tolerance: float = 0.05  # on Lambda in wide layers (docs/speed.md); 0 is exact
    rolling: float = 0.0  # how much of earlier statistics stays at a refresh; 0 is none
    reference: str = "paper"  # authors: BatchNorm's statistic as in the released code

    def __post_init__(self) -> None:
        one_of(("paper", "authors"), **{"lpr.reference": self.reference})
        at_least(0, **{"lpr.omega_0": self.omega_0, "lpr.beta": self.beta})
        for name, value, limit in (
            ("tolerance", self.tolerance, 0.5),
            ("rolling", self.rolling, 1),
        ):
            if not 0 <= value < limit:
                raise InputError(f"lpr.{name}={value}; give at least 0 and less than {limit:g}.")


@dataclass(frozen=True)
class ProjectionOptions:
    """The other gradient rules; each takes those it knows."""

    samples: int = 200  # A-GEM: remembered examples behind the reference gradient
    alpha: float | None = None  # OWM, AOP: a constant; None for AOP's own schedule, 1e-3 for OWM
    energy: float = 0.97  # GPM, SGP: share of the Gram's trace that the basis holds
    scale: float = 10.0  # SGP: how fast importance saturates
    norms: str = "plain"  # what happens to normalisation layers
    head: str = "treat"  # OWM, AOP, GPM, SGP: free leaves the head to the plain gradient

    def __post_init__(self) -> None:
        at_least(1, **{"projection.samples": self.samples})
        at_least(0, **{"projection.alpha": self.alpha, "projection.scale": self.scale})
        if not 0 < self.energy <= 1:
            raise InputError(f"projection.energy={self.energy}; give more than 0 and at most 1.")
        one_of(("plain", "treat", "freeze"), **{"projection.norms": self.norms})
        one_of(("treat", "free"), **{"projection.head": self.head})


@dataclass(frozen=True)
class RefreshOptions:
    """When and from what a rule is refreshed.

    Every so many stream batches from the memory; or, with ``every="task"`` and for GPM and SGP, at
    the end of every task from the examples of that task, beside what is closed already.
    """

    every: int | str = 10  # T in the paper, in stream batches; or "task"
    samples: int | None = None  # n in the paper; None is the whole memory, or the whole task

    def __post_init__(self) -> None:
        at_least(1, **{"refresh.samples": self.samples})
        if isinstance(self.every, int):
            at_least(1, **{"refresh.every": self.every})
        elif self.every != "task":
            raise InputError(
                f"refresh.every={self.every}; give a number of stream batches, or task."
            )

    @property
    def interval(self) -> int | None:
        """Stream batches between refreshes; None for the ends of tasks."""
        return self.every if isinstance(self.every, int) else None


@dataclass(frozen=True)
class LossOptions:
    """Weights inside the replay losses; each loss takes those it knows."""

    alpha: float = 0.5  # ER-ACE: share of the incoming batch
    rho: float = 0.1  # LODE: how hard new classes push old ones down
    replay_weight: float = 1.0  # DER: of the replayed cross-entropy
    logit_weight: float = 1.0  # DER: of the distance between logits
    teacher_every: int = 10  # DER as in the paper: stream batches between snapshots

    def __post_init__(self) -> None:
        at_least(0, **{f"loss.{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)})
        at_least(1, **{"loss.teacher_every": self.teacher_every})


@dataclass(frozen=True)
class AveragingOptions:
    """Averaging of the weights."""

    momentum: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(
                f"averaging.momentum={self.momentum}; give at least 0 and less than 1."
            )


@dataclass(frozen=True)
class LearnerOptions:
    """How a learner learns from a stream batch."""

    lr: float = 0.1  # eta in the paper
    steps_per_batch: int = 3  # S in the paper
    replay_batch: int = 10
    capacity: int = 2000  # examples remembered
    refresh_samples: int | None = 100  # n in the paper; as good as the whole memory (docs/speed.md)

    def __post_init__(self) -> None:
        at_least(0, lr=self.lr)
        at_least(
            1,
            steps_per_batch=self.steps_per_batch,
            replay_batch=self.replay_batch,
            capacity=self.capacity,
            refresh_samples=self.refresh_samples,
        )
