"""Options: every default stands here once, for the Python classes and for the command line alike.

Frozen dataclasses that check themselves. They import no torch, so that commands which only list or
check something answer at once. A Python class takes its defaults from here
(``omega_0: float = LPROptions.omega_0``), and a `RunConfig` holds these dataclasses as they are.
``proxreplay settings`` prints what stands under Args.
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


def at_most(upper: float, **values: float | None) -> None:
    """Refuse values above ``upper``; None passes."""
    for name, value in values.items():
        if value is not None and value > upper:
            raise InputError(f"{name}={value}; give at most {upper:g}.")


def below(upper: float, **values: float) -> None:
    """Refuse values that are not at least 0 and less than ``upper``."""
    for name, value in values.items():
        if not 0 <= value < upper:
            raise InputError(f"{name}={value}; give at least 0 and less than {upper:g}.")


def one_of(options: tuple[str | None, ...], **values: str | None) -> None:
    """Refuse values that are not among the options."""
    for name, value in values.items():
        if value not in options:
            known = ", ".join("none" if o is None else o for o in options)
            raise InputError(f"{name}={value}; give one of {known}.")


@dataclass(frozen=True)
class LPROptions:
    """Layerwise Proximal Replay.

    Args:
        omega_0: strength.
        beta: how fast the strength falls with the number of rows per example.
        tolerance: largest error of the shrinkage in wide layers; 0 is exact (docs/speed.md).
        rolling: decay of the moving average over refreshes; 0 uses only the newest examples.
        reference: authors for BatchNorm's statistic as in the released code, else paper.
    """

    omega_0: float = 1.0
    beta: float = 1.0
    tolerance: float = 0.05
    rolling: float = 0.0
    reference: str = "paper"

    def __post_init__(self) -> None:
        one_of(("paper", "authors"), **{"lpr.reference": self.reference})
        at_least(0, **{"lpr.omega_0": self.omega_0, "lpr.beta": self.beta})
        at_most(1e12, **{"lpr.omega_0": self.omega_0})  # far beyond a hard projection
        at_most(10, **{"lpr.beta": self.beta})
        below(0.5, **{"lpr.tolerance": self.tolerance})
        below(1, **{"lpr.rolling": self.rolling})


@dataclass(frozen=True)
class ProjectionOptions:
    """The other gradient rules; each takes those it knows.

    Args:
        samples: A-GEM: remembered examples behind the reference gradient.
        alpha: OWM, AOP: a constant; none for AOP's own schedule and for OWM's 1e-3.
        energy: GPM, SGP: share of the Gram matrix's trace that the basis holds.
        scale: SGP: how fast importance saturates.
        norms: normalisation layers: plain gradient, treat like others, or freeze after task 1.
        head: free leaves the head to the plain gradient.
    """

    samples: int = 200
    alpha: float | None = None
    energy: float = 0.97
    scale: float = 10.0
    norms: str = "plain"
    head: str = "treat"

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
    the end of every task from the examples of that task, in addition to earlier tasks.

    Args:
        every: T in the paper, in stream batches; or task.
        samples: n in the paper; none is the whole memory, or the whole task.
    """

    every: int | str = 10
    samples: int | None = None

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
    """Weights inside the replay losses; each loss takes those it knows.

    Args:
        alpha: ER-ACE: share of the incoming batch.
        rho: LODE: how hard new classes push old ones down.
        replay_weight: DER: of the replayed cross-entropy.
        logit_weight: DER: of the distance between logits.
        teacher_every: DER as in the paper: stream batches between snapshots.
    """

    alpha: float = 0.5
    rho: float = 0.1
    replay_weight: float = 1.0
    logit_weight: float = 1.0
    teacher_every: int = 10

    def __post_init__(self) -> None:
        at_least(0, **{f"loss.{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)})
        at_least(1, **{"loss.teacher_every": self.teacher_every})


PREDICTORS = ("average", "online", "both", "blend")


@dataclass(frozen=True)
class AveragingOptions:
    """Averaging of the weights (docs/averaging.md).

    Args:
        momentum: decay of the moving average per step; its horizon is 1 / (1 - momentum) steps.
        start: debiased, or copy: of the untrained network, as in the paper.
        predict: average, online, both (mean of their probabilities) or blend (weighted mean).
    """

    momentum: float = 0.997
    start: str = "debiased"
    predict: str = "blend"

    def __post_init__(self) -> None:
        below(1, **{"averaging.momentum": self.momentum})
        one_of(("debiased", "copy"), **{"averaging.start": self.start})
        one_of(PREDICTORS, **{"averaging.predict": self.predict})


@dataclass(frozen=True)
class DistillationOptions:
    """The average of the weights as a teacher.

    Args:
        weight: of the divergence from the average's predictions; 0 for no teacher.
        temperature: at which predictions are compared.
        on: replay, or all: incoming examples too.
    """

    weight: float = 0.0
    temperature: float = 2.0
    on: str = "replay"

    def __post_init__(self) -> None:
        at_least(0, **{"distillation.weight": self.weight})
        if not 0 < self.temperature < float("inf"):
            raise InputError(
                f"distillation.temperature={self.temperature}; give a finite number above 0."
            )
        one_of(("replay", "all"), **{"distillation.on": self.on})


@dataclass(frozen=True)
class LearnerOptions:
    """How a learner learns from a stream batch.

    Args:
        lr: learning rate, eta in the paper.
        steps_per_batch: SGD steps per stream batch, S in the paper.
        replay_batch: remembered examples per step.
        capacity: examples remembered.
        refresh_samples: n in the paper; as good as the whole memory (docs/speed.md).
    """

    lr: float = 0.1
    steps_per_batch: int = 3
    replay_batch: int = 10
    capacity: int = 2000
    refresh_samples: int | None = 100

    def __post_init__(self) -> None:
        at_least(0, lr=self.lr)
        at_least(
            1,
            steps_per_batch=self.steps_per_batch,
            replay_batch=self.replay_batch,
            capacity=self.capacity,
            refresh_samples=self.refresh_samples,
        )
