"""Options: every default stands here once, for the Python classes and for the command line alike.

Frozen dataclasses that check themselves: the annotation of a field says what it may be. They import
no torch, so that commands which only list or check something answer at once. A Python class takes
its defaults from here (``omega_0: float = LPROptions.omega_0``), and a `RunConfig` holds these
dataclasses as they are. ``proxreplay settings`` prints what stands under Args.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral, Real
from typing import Annotated, Any, get_args, get_type_hints

from proxreplay.errors import InputError

MAX_DIM = 8192  # columns: a layer with more has no dense matrix in any rule
CHECKPOINT_EVERY = 100  # stream batches between checkpoints of a run


def _refuse(values: Mapping[str, Any], fits: Callable[[Any], bool], wanted: str) -> None:
    """Refuse values that do not fit; None passes."""
    for name, value in values.items():
        if value is not None and not fits(value):
            raise InputError(f"{name}={value!r}; give {wanted}.")


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def at_least(lower: float, **values: float | None) -> None:
    """Refuse values below ``lower`` and values that are not finite; None passes."""
    wanted = f"a finite number of at least {lower}"
    _refuse(values, lambda value: _is(Real, value) and lower <= value < math.inf, wanted)


def count(lower: int = 1, **values: int | None) -> None:
    """Refuse what is not a whole number of at least ``lower``; None passes."""
    wanted = f"a whole number of at least {lower}"
    _refuse(values, lambda value: _is(Integral, value) and value >= lower, wanted)


def at_most(upper: float, **values: float | None) -> None:
    """Refuse values above ``upper``; None passes."""
    _refuse(values, lambda value: value <= upper, f"at most {upper:g}")


def below(upper: float, **values: float) -> None:
    """Refuse values that are not at least 0 and less than ``upper``."""
    _refuse(values, lambda value: 0 <= value < upper, f"at least 0 and less than {upper:g}")


def positive(**values: float | None) -> None:
    """Refuse what is not a finite number above 0; None passes."""
    _refuse(values, lambda value: 0 < value < math.inf, "a finite number above 0")


def fraction(**values: float) -> None:
    """Refuse what is not above 0 and at most 1."""
    _refuse(values, lambda value: 0 < value <= 1, "more than 0 and at most 1")


def one_of(options: tuple[str | bool | None, ...], **values: str | bool | None) -> None:
    """Refuse values that are not among the options."""
    for name, value in values.items():
        if value not in options:
            known = ", ".join(str(o).lower() for o in options)
            raise InputError(f"{name}={value}; give one of {known}.")


Check = Callable[..., None]
Count = Annotated[int, partial(count, 1)]
Amount = Annotated[float, partial(at_least, 0)]
Strength = Annotated[float, partial(at_least, 0), partial(at_most, 1e12)]  # far beyond a projection
Share = Annotated[float, partial(at_least, 0), partial(at_most, 1)]
Decay = Annotated[float, partial(below, 1)]
Tolerance = Annotated[float, partial(below, 0.5)]
Positive = Annotated[float, positive]
Fraction = Annotated[float, fraction]


@cache
def _checks(options: type) -> dict[str, list[Check]]:
    """What the annotation of every field holds it to."""
    hints = get_type_hints(options, include_extras=True)
    return {
        name: [
            check for part in (hint, *get_args(hint)) for check in getattr(part, "__metadata__", ())
        ]
        for name, hint in hints.items()
    }


class Options:
    """Fields that are checked by their annotations, under the names that users know.

    ``class LPROptions(Options, prefix="lpr.")``: errors then speak of ``lpr.omega_0``.
    """

    _prefix = ""

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        options: Any = type(self)
        for name, checks in _checks(options).items():
            for check in checks:
                check(**{self._prefix + name: getattr(self, name)})


@dataclass(frozen=True)
class LPROptions(Options, prefix="lpr."):
    """Layerwise Proximal Replay.

    Args:
        omega_0: strength as in the paper; none for one that sets itself (docs/strength.md).
        beta: with omega_0, how fast the strength falls with the number of rows per example.
        tolerance: largest error of the shrinkage in wide layers with omega_0; without, or with
            statistics=step, these keep 1/16 of their directions; 0 is exact (docs/speed.md).
        rolling: decay of the moving average over refreshes; 0 uses only the newest examples.
        reference: authors for BatchNorm's statistic as in the released code, else paper.
        statistics: refresh: from passes over the memory; step: from the training steps themselves.
        level: without omega_0, the strength relative to the layer's own rows.
        gradient: incoming, to let replay through; all, as in the paper; none for all with omega_0
            and in networks of tokens, else for incoming (docs/strength.md).
        work: without omega_0 and with the default refresh.every, most that a refresh may take of
            the counted work of the steps since the last one; others are left out. 0 for no limit.
        per: batch, to change what the steps of a stream batch bring once, at the last of them;
            step, as in the paper; none for batch, or step with omega_0.
    """

    omega_0: Strength | None = None
    beta: Annotated[float, partial(at_least, 0), partial(at_most, 10)] = 1.0
    tolerance: Tolerance = 0.05
    rolling: Decay = 0.0
    reference: Annotated[str, partial(one_of, ("paper", "authors"))] = "paper"
    statistics: Annotated[str, partial(one_of, ("refresh", "step"))] = "refresh"
    level: Strength = 0.5
    gradient: Annotated[str | None, partial(one_of, (None, "incoming", "all"))] = None
    work: Share = 0.125
    per: Annotated[str | None, partial(one_of, (None, "batch", "step"))] = None

    @property
    def acts_per(self) -> str:
        """How often it is: batch or step."""
        waits = self.omega_0 is None and self.gradient != "all"
        return self.per or ("batch" if waits else "step")


@dataclass(frozen=True)
class StepOptions(Options, prefix="step."):
    """Statistics from the training steps themselves.

    Args:
        every: steps per step that is looked at.
        rebuild: steps looked at between rebuilds of the factors.
        decay: of the moving average per step looked at.
        incoming: weight of incoming examples beside replayed ones.
        balance: whether replayed examples count classes seen / classes in the batch times as much.
    """

    every: Count = 15
    rebuild: Count = 2
    decay: Decay = 0.88
    incoming: Amount = 0.0
    balance: bool = False


@dataclass(frozen=True)
class KroneckerOptions(Options, prefix="klpr."):
    """The two-sided rule (docs/rules.md).

    Args:
        strength: of the metric, where the mean curvature is 1.
        scope: layer: each has its own mean curvature; model: one for all layers.
        form: inverses, exact, or auto for exact where that costs next to nothing.
        fisher: loss: gradients of the loss itself; sampled or exact: of the model's predictions.
        norms: normalisation layers: treat, or plain gradient.
        tolerance: with tau, largest error of the inputs' shrinkage in wide layers; else these keep
            1/16 of their directions; 0 is exact.
        tau: absolute damping in place of a strength, as OCAR has it; none for the strength.
        tau_growth: what tau gains per step.
    """

    strength: Strength = 0.3
    scope: Annotated[str, partial(one_of, ("model", "layer"))] = "layer"
    form: Annotated[str, partial(one_of, ("auto", "exact", "inverses"))] = "inverses"
    fisher: Annotated[str, partial(one_of, ("loss", "sampled", "exact"))] = "loss"
    norms: Annotated[str, partial(one_of, ("treat", "plain"))] = "treat"
    tolerance: Tolerance = 0.05
    tau: Positive | None = None
    tau_growth: Amount = 0.0


KRONECKER_STEPS = StepOptions(every=6, rebuild=2, decay=0.95, incoming=1.0, balance=True)


@dataclass(frozen=True)
class ProjectionOptions(Options, prefix="projection."):
    """The other gradient rules; each takes those it knows.

    Args:
        samples: A-GEM: remembered examples behind the reference gradient.
        alpha: OWM, AOP: a constant; none for AOP's own schedule and for OWM's 1e-3.
        energy: GPM, SGP: share of the Gram matrix's trace that the basis holds.
        scale: SGP: how fast importance saturates.
        norms: normalisation layers: plain gradient, treat like others, or freeze after task 1.
        head: free leaves the head to the plain gradient.
    """

    samples: Count = 200
    alpha: Amount | None = None
    energy: Fraction = 0.97
    scale: Amount = 10.0
    norms: Annotated[str, partial(one_of, ("plain", "treat", "freeze"))] = "plain"
    head: Annotated[str, partial(one_of, ("treat", "free"))] = "treat"


@dataclass(frozen=True)
class FloorOptions(Options, prefix="floor."):
    """Streaming LDA on random features, a floor.

    Args:
        filters: random filters; on images each gives 4 x 4 features.
        shrinkage: of the shared covariance towards a multiple of the identity.
    """

    filters: Count = 64
    shrinkage: Annotated[float, fraction, partial(at_least, 1e-9)] = 0.1  # less has no inverse


@dataclass(frozen=True)
class CompanionOptions(FloorOptions, prefix="companion."):
    """Streaming LDA on random features that predicts beside the network (docs/companion.md).

    Args:
        filters: random filters, at most; fewer where inputs have few numbers.
        shrinkage: of the shared covariance towards a multiple of the identity.
        weight: of its logarithms of probabilities; 0 for no companion.
    """

    weight: Strength = 1.0


@dataclass(frozen=True)
class RefreshOptions(Options, prefix="refresh."):
    """When and from what a rule is refreshed.

    Every so many stream batches from the memory; or, with ``every="task"`` and for GPM and SGP, at
    the end of every task from the examples of that task, in addition to earlier tasks.

    Args:
        every: T in the paper, in stream batches; or task. Only the default may be stretched, by
            lpr.work.
        samples: n in the paper; none is the whole memory, or the whole task.
    """

    every: int | str = 10
    samples: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.every, int):
            count(**{"refresh.every": self.every})
        elif self.every != "task":
            raise InputError(
                f"refresh.every={self.every}; give a number of stream batches, or task."
            )

    @property
    def interval(self) -> int | None:
        """Stream batches between refreshes; None for the ends of tasks."""
        return self.every if isinstance(self.every, int) else None


@dataclass(frozen=True)
class CallbackOptions(Options):
    """When a callback of somebody else's trainer refreshes a rule.

    Args:
        every: optimizer steps between refreshes.
        samples: examples per refresh; None for all that the source gives.
    """

    every: Count = 30
    samples: Count | None = 100


@dataclass(frozen=True)
class LossOptions(Options, prefix="loss."):
    """Weights inside the replay losses; each loss takes those it knows.

    Args:
        alpha: ER-ACE: share of the incoming batch.
        rho: LODE: how hard new classes push old ones down.
        replay_weight: DER: of the replayed cross-entropy.
        logit_weight: DER: of the distance between logits.
        teacher_every: DER as in the paper: stream batches between snapshots.
    """

    alpha: Amount = 0.5
    rho: Amount = 0.1
    replay_weight: Amount = 1.0
    logit_weight: Amount = 1.0
    teacher_every: Count = 10


PREQUENTIAL_FADING = 0.995  # per example: the accuracy of the last 200 or so
PREDICTORS = ("average", "online", "both", "blend")  # of the networks
COMPANY = ("joint", "companion")  # the networks with their companion, and it alone


@dataclass(frozen=True)
class AveragingOptions(Options, prefix="averaging."):
    """Averaging of the weights (docs/averaging.md).

    Args:
        momentum: decay of the moving average per step; its horizon is 1 / (1 - momentum) steps.
        start: debiased, or copy: of the untrained network, as in the paper.
        predict: average, online, both (mean of their probabilities) or blend (weighted mean).
    """

    momentum: Decay = 0.997
    start: Annotated[str, partial(one_of, ("debiased", "copy"))] = "debiased"
    predict: Annotated[str, partial(one_of, PREDICTORS)] = "blend"


@dataclass(frozen=True)
class DistillationOptions(Options, prefix="distillation."):
    """The average of the weights as a teacher.

    Args:
        weight: of the divergence from the average's predictions; 0 for no teacher.
        temperature: at which predictions are compared.
        on: replay, or all: incoming examples too.
    """

    weight: Amount = 0.0
    temperature: Positive = 2.0
    on: Annotated[str, partial(one_of, ("replay", "all"))] = "replay"


@dataclass(frozen=True)
class LearnerOptions(Options):
    """How a learner learns from a stream batch.

    Args:
        lr: learning rate, eta in the paper.
        batch_size: examples per stream batch.
        steps_per_batch: SGD steps per stream batch, S in the paper.
        replay_batch: remembered examples per step.
        capacity: examples remembered.
        refresh_samples: n in the paper; as good as the whole memory (docs/speed.md).
    """

    lr: Amount = 0.1
    batch_size: Count = 10
    steps_per_batch: Count = 3
    replay_batch: Count = 10
    capacity: Count = 2000
    refresh_samples: Count | None = 100


@dataclass(frozen=True)
class DurableOptions(Options):
    """How a learner is kept on disk (docs/serve.md).

    Whatever the budgets say, the two newest snapshots and the events after the older one stay.

    Args:
        snapshot_every: events between snapshots.
        keep_snapshots: snapshots kept.
        keep_events: applied events whose data is kept, to go back to.
        keep_days: age in days of the oldest snapshot and event kept; none for any age.
        keep_bytes: size of snapshots and events together; none for any size.
        keep_history: events of which kind, time and idempotency key are known.
        queue_events: events on disk that wait for being applied; more are refused.
        queue_bytes: the same in bytes.
        kept_inputs: inputs of predictions that wait for their labels; the oldest go first.
        kept_bytes: the same in bytes.
        prequential: predict every batch before it is learned, for accuracy and guards.
    """

    snapshot_every: Count = 100
    keep_snapshots: Annotated[int, partial(count, 2)] = 5
    keep_events: Count = 1000
    keep_days: Amount | None = None
    keep_bytes: Count | None = None
    keep_history: Count = 1_000_000
    queue_events: Count = 1000
    queue_bytes: Count = 256 * 2**20
    kept_inputs: Count = 100_000
    kept_bytes: Count = 256 * 2**20
    prequential: bool = True


@dataclass(frozen=True)
class GuardOptions(Options, prefix="guard."):
    """What a guard watches, and what it does then.

    Args:
        action: stop: refuse to learn until `resume`; rollback: to the last good snapshot.
        finite: whether a loss or gradient that is not finite counts.
        accuracy: least prequential accuracy in the window; none for any.
        recall: least recall in the window, by label; empty for any.
        window: examples looked at; nothing is judged before there are as many.
    """

    action: Annotated[str, partial(one_of, ("stop", "rollback"))] = "stop"
    finite: bool = True
    accuracy: Share | None = None
    recall: tuple[tuple[str | int, float], ...] = ()
    window: Count = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for label, least in self.recall:
            at_least(0, **{f"guard.recall[{label!r}]": least})
            at_most(1, **{f"guard.recall[{label!r}]": least})


@dataclass(frozen=True)
class ServeOptions(Options):
    """Limits of a server.

    Args:
        body_bytes: largest request body; larger ones get 413.
        batch: most examples per request.
        wait_seconds: longest time that ``?wait=applied`` waits.
        connections: requests at the same time; more get 503.
    """

    body_bytes: Count = 16 * 2**20
    batch: Count = 1000
    wait_seconds: Amount = 30.0
    connections: Count = 200
