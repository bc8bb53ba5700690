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
        omega_0: strength as in the paper; none for one that sets itself (docs/strength.md).
        beta: with omega_0, how fast the strength falls with the number of rows per example.
        tolerance: largest error of the shrinkage in wide layers; 0 is exact (docs/speed.md).
        rolling: decay of the moving average over refreshes; 0 uses only the newest examples.
        reference: authors for BatchNorm's statistic as in the released code, else paper.
        statistics: refresh: from passes over the memory; step: from the training steps themselves.
        level: without omega_0, the strength relative to the layer's own rows.
        gradient: incoming, to let replay through; all, as in the paper; none for incoming, or all
            with omega_0.
    """

    omega_0: float | None = None
    beta: float = 1.0
    tolerance: float = 0.05
    rolling: float = 0.0
    reference: str = "paper"
    statistics: str = "refresh"
    level: float = 0.5
    gradient: str | None = None

    def __post_init__(self) -> None:
        one_of(("paper", "authors"), **{"lpr.reference": self.reference})
        one_of(("refresh", "step"), **{"lpr.statistics": self.statistics})
        one_of((None, "incoming", "all"), **{"lpr.gradient": self.gradient})
        at_least(0, **{"lpr.omega_0": self.omega_0, "lpr.beta": self.beta, "lpr.level": self.level})
        at_most(1e12, **{"lpr.level": self.level})
        at_most(1e12, **{"lpr.omega_0": self.omega_0})  # far beyond a hard projection
        at_most(10, **{"lpr.beta": self.beta})
        below(0.5, **{"lpr.tolerance": self.tolerance})
        below(1, **{"lpr.rolling": self.rolling})

    @property
    def acts_on(self) -> str:
        """Which gradient is shrunk: incoming or all."""
        return self.gradient or ("incoming" if self.omega_0 is None else "all")


@dataclass(frozen=True)
class StepOptions:
    """Statistics from the training steps themselves.

    Args:
        every: steps per step that is looked at.
        rebuild: steps looked at between rebuilds of the factors.
        decay: of the moving average per step looked at.
        incoming: weight of incoming examples beside replayed ones.
        balance: whether replayed examples count classes seen / classes in the batch times as much.
    """

    every: int = 3
    rebuild: int = 10
    decay: float = 0.97
    incoming: float = 0.0
    balance: bool = False

    def __post_init__(self) -> None:
        count(**{"step.every": self.every, "step.rebuild": self.rebuild})
        below(1, **{"step.decay": self.decay})
        at_least(0, **{"step.incoming": self.incoming})


@dataclass(frozen=True)
class KroneckerOptions:
    """The two-sided rule (docs/rules.md).

    Args:
        strength: of the metric, where the mean curvature is 1.
        scope: layer: each has its own mean curvature; model: one for all layers.
        form: inverses, exact, or auto for exact where that costs next to nothing.
        fisher: loss: gradients of the loss itself; sampled or exact: of the model's predictions.
        norms: normalisation layers: treat, or plain gradient.
        tolerance: largest error of the inputs' shrinkage in wide layers; 0 is exact.
        tau: absolute damping in place of a strength, as OCAR has it; none for the strength.
        tau_growth: what tau gains per step.
    """

    strength: float = 0.3
    scope: str = "layer"
    form: str = "inverses"
    fisher: str = "loss"
    norms: str = "treat"
    tolerance: float = 0.05
    tau: float | None = None
    tau_growth: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, **{"klpr.strength": self.strength, "klpr.tau_growth": self.tau_growth})
        at_most(1e12, **{"klpr.strength": self.strength})
        one_of(("model", "layer"), **{"klpr.scope": self.scope})
        one_of(("auto", "exact", "inverses"), **{"klpr.form": self.form})
        one_of(("loss", "sampled", "exact"), **{"klpr.fisher": self.fisher})
        one_of(("treat", "plain"), **{"klpr.norms": self.norms})
        below(0.5, **{"klpr.tolerance": self.tolerance})
        if self.tau is not None and not 0 < self.tau < float("inf"):
            raise InputError(f"klpr.tau={self.tau}; give a finite number above 0, or none.")


KRONECKER_STEPS = StepOptions(every=3, rebuild=3, decay=0.95, incoming=1.0, balance=True)


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
class FloorOptions:
    """Streaming LDA on random features, a floor.

    Args:
        filters: random filters; on images each gives 4 x 4 features.
        shrinkage: of the shared covariance towards a multiple of the identity.
    """

    filters: int = 64
    shrinkage: float = 0.1

    def __post_init__(self) -> None:
        at_least(1, **{"floor.filters": self.filters})
        if not 0 < self.shrinkage <= 1:
            raise InputError(f"floor.shrinkage={self.shrinkage}; give more than 0 and at most 1.")


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
class CallbackOptions:
    """When a callback of somebody else's trainer refreshes a rule.

    Args:
        every: optimizer steps between refreshes.
        samples: examples per refresh; None for all that the source gives.
    """

    every: int = 30
    samples: int | None = 100

    def __post_init__(self) -> None:
        count(every=self.every, samples=self.samples)


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


PREQUENTIAL_FADING = 0.995  # per example: the accuracy of the last 200 or so
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


@dataclass(frozen=True)
class DurableOptions:
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

    snapshot_every: int = 100
    keep_snapshots: int = 5
    keep_events: int = 1000
    keep_days: float | None = None
    keep_bytes: int | None = None
    keep_history: int = 1_000_000
    queue_events: int = 1000
    queue_bytes: int = 256 * 2**20
    kept_inputs: int = 100_000
    kept_bytes: int = 256 * 2**20
    prequential: bool = True

    def __post_init__(self) -> None:
        count(
            snapshot_every=self.snapshot_every,
            keep_events=self.keep_events,
            keep_bytes=self.keep_bytes,
            keep_history=self.keep_history,
            queue_events=self.queue_events,
            queue_bytes=self.queue_bytes,
            kept_inputs=self.kept_inputs,
            kept_bytes=self.kept_bytes,
        )
        count(2, keep_snapshots=self.keep_snapshots)
        at_least(0, keep_days=self.keep_days)


@dataclass(frozen=True)
class GuardOptions:
    """What a guard watches, and what it does then.

    Args:
        action: stop: refuse to learn until `resume`; rollback: to the last good snapshot.
        finite: whether a loss or gradient that is not finite counts.
        accuracy: least prequential accuracy in the window; none for any.
        recall: least recall in the window, by label; empty for any.
        window: examples looked at; nothing is judged before there are as many.
    """

    action: str = "stop"
    finite: bool = True
    accuracy: float | None = None
    recall: tuple[tuple[str | int, float], ...] = ()
    window: int = 200

    def __post_init__(self) -> None:
        one_of(("stop", "rollback"), **{"guard.action": self.action})
        count(**{"guard.window": self.window})
        bounds = {f"guard.recall[{label!r}]": least for label, least in self.recall}
        if self.accuracy is not None:
            bounds["guard.accuracy"] = self.accuracy
        at_least(0, **bounds)
        at_most(1, **bounds)


@dataclass(frozen=True)
class ServeOptions:
    """Limits of a server.

    Args:
        body_bytes: largest request body; larger ones get 413.
        batch: most examples per request.
        wait_seconds: longest time that ``?wait=applied`` waits.
        connections: requests at the same time; more get 503.
    """

    body_bytes: int = 16 * 2**20
    batch: int = 1000
    wait_seconds: float = 30.0
    connections: int = 200

    def __post_init__(self) -> None:
        count(
            body_bytes=self.body_bytes,
            batch=self.batch,
            connections=self.connections,
        )
        at_least(0, wait_seconds=self.wait_seconds)
