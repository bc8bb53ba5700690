"""Methods are recipes: which loss, rule, averaging and head a name stands for.

Declarations only: torch is imported when a loss or a rule is built.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from proxreplay.errors import InputError
from proxreplay.experiments.config import RunConfig
from proxreplay.lazy import LazyModule
from proxreplay.options import AveragingOptions, DistillationOptions, LPROptions

if TYPE_CHECKING:
    from torch import nn

    from proxreplay import proximal
    from proxreplay.models import heads
    from proxreplay.replay import losses
else:
    proximal = LazyModule("proxreplay.proximal")
    heads = LazyModule("proxreplay.models.heads")
    losses = LazyModule("proxreplay.replay.losses")

LPR_PREFIX = "lpr-"
AVERAGED_SUFFIX = "-avg"


@dataclass(frozen=True)
class RuleInputs:
    """What a gradient rule is built from.

    Args:
        model: whose gradients it changes.
        config: of the run.
        steps: SGD steps of the whole stream, for schedules over it.
    """

    model: "nn.Module"
    config: RunConfig
    steps: int


@dataclass(frozen=True)
class Method:
    """The parts that a method composes.

    Args:
        name: as users write it.
        label: as the paper prints it.
        about: one line for people.
        loss: from the configuration to the replay loss.
        rule: the gradient rule, from what it may need to know; None for plain SGD.
        averaged: whether the weights are averaged for prediction.
        values: configuration values that make it what it is.
        head: ``growing`` with a mask over unseen classes, or ``fixed`` with all classes.
        replay: whether it replays, so that LPR can be added to it.
        uses: the configuration keys that matter to it beyond the common ones.
        tuned_like: methods whose settings it takes on a benchmark that has none for it.
        iid: whether it learns from all classes mixed, as the upper bound.
        task_ends: whether its rule can be refreshed at task ends, from the task's examples.
    """

    name: str
    label: str
    about: str
    loss: "Callable[[RunConfig], losses.Loss]"
    rule: "Callable[[RuleInputs], proximal.GradientRule] | None" = None
    averaged: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    head: Literal["growing", "fixed"] = "growing"
    replay: bool = True
    uses: tuple[str, ...] = ()
    tuned_like: tuple[str, ...] = ()
    iid: bool = False
    task_ends: bool = False


_REFRESH_KEYS = ("refresh.every", "refresh.samples")
_LPR_KEYS = (*(f"lpr.{f.name}" for f in dataclasses.fields(LPROptions)), *_REFRESH_KEYS)
_AVERAGING_KEYS = tuple(f"averaging.{f.name}" for f in dataclasses.fields(AveragingOptions))
_DISTILLATION_KEYS = tuple(
    f"distillation.{f.name}" for f in dataclasses.fields(DistillationOptions)
)
_SCOPE_KEYS = ("projection.norms", "projection.head")


def _lpr(build: RuleInputs) -> "proximal.GradientRule":
    own = build.config.lpr
    return proximal.LPR(
        build.model,
        own.omega_0,
        own.beta,
        reference=cast(Literal["paper", "authors"], own.reference),
        tolerance=own.tolerance,
        rolling=own.rolling,
    )


def _with_lpr(base: Method) -> Method:
    return dataclasses.replace(
        base,
        name=LPR_PREFIX + base.name,
        label=f"LPR ({base.label})",
        about=f"{base.label} with gradients preconditioned by LPR",
        rule=_lpr,
        uses=(*base.uses, *_LPR_KEYS),
    )


def _with_average(base: Method) -> Method:
    return dataclasses.replace(
        base,
        name=base.name + AVERAGED_SUFFIX,
        label=f"{base.label} averaged",
        about=f"{base.label}; an average of the weights predicts too",
        averaged=True,
        uses=(*base.uses, *_AVERAGING_KEYS, *_DISTILLATION_KEYS),
    )


def _aop(build: RuleInputs) -> "proximal.GradientRule":
    alpha = build.config.projection.alpha
    schedule = proximal.AdaptiveAlpha(proximal.StreamProgress(build.steps))
    return proximal.AOP(
        build.model,
        schedule if alpha is None else alpha,
        norms=_norms_without_task_ends(build.config),
        exclude=_excluded(build.config),
    )


def _owm(build: RuleInputs) -> "proximal.GradientRule":
    alpha = build.config.projection.alpha
    return proximal.OWM(
        build.model,
        1e-3 if alpha is None else alpha,
        norms=_norms_without_task_ends(build.config),
        exclude=_excluded(build.config),
    )


def _gpm(build: RuleInputs) -> "proximal.GradientRule":
    own = build.config.projection
    return proximal.GPM(
        build.model,
        own.energy,
        accumulate=build.config.refresh.interval is None,
        norms=cast(Literal["plain", "treat", "freeze"], own.norms),
        exclude=_excluded(build.config),
    )


def _sgp(build: RuleInputs) -> "proximal.GradientRule":
    own = build.config.projection
    return proximal.SGP(
        build.model,
        own.energy,
        scale=own.scale,
        accumulate=build.config.refresh.interval is None,
        norms=cast(Literal["plain", "treat", "freeze"], own.norms),
        exclude=_excluded(build.config),
    )


def _excluded(config: RunConfig) -> tuple[type["nn.Module"], ...]:
    return (heads.GrowingHead,) if config.projection.head == "free" else ()


def _norms_without_task_ends(config: RunConfig) -> Literal["plain", "treat"]:
    if config.projection.norms == "freeze":
        raise InputError(
            f"projection.norms=freeze: {config.method} has no task ends at which to freeze; give "
            "plain or treat."
        )
    return cast(Literal["plain", "treat"], config.projection.norms)


_BASE = [
    Method(
        "finetune",
        "Fine-tuning",
        "SGD on the stream alone",
        lambda c: losses.Finetune(),
        replay=False,
    ),
    Method("er", "ER", "experience replay, one joint forward pass", lambda c: losses.Er()),
    Method(
        "er-ace",
        "ER-ACE",
        "ER; incoming examples compete only with classes of their own batch",
        lambda c: losses.ErAce(c.loss.alpha),
        uses=("loss.alpha",),
        tuned_like=("lode",),
    ),
    Method(
        "der",
        "DER",
        "ER plus the logits of an earlier snapshot of the network, as in the paper",
        lambda c: losses.DerppSnapshot(
            c.loss.replay_weight, c.loss.logit_weight, c.loss.teacher_every
        ),
        head="fixed",
        uses=("loss.replay_weight", "loss.logit_weight", "loss.teacher_every"),
    ),
    Method(
        "derpp",
        "DER++",
        "ER plus the logits stored with each example",
        lambda c: losses.Derpp(c.loss.replay_weight, c.loss.logit_weight),
        head="fixed",
        uses=("loss.replay_weight", "loss.logit_weight"),
        tuned_like=("der",),
    ),
    Method(
        "ema",
        "EMA",
        "ER; a moving average of the weights predicts",
        lambda c: losses.Er(),
        averaged=True,
        values={"averaging.start": "copy", "averaging.predict": "average"},
        uses=_AVERAGING_KEYS,
    ),
    Method(
        "lode",
        "LODE",
        "ER; telling new classes apart and from old ones has separate weights",
        lambda c: losses.Lode(c.loss.rho),
        uses=("loss.rho",),
    ),
    Method(
        "agem",
        "A-GEM",
        "stream only; gradients never oppose that of remembered examples",
        lambda c: losses.Finetune(),
        rule=lambda build: proximal.AGEM(build.model, samples=build.config.projection.samples),
        replay=False,
        uses=("projection.samples",),
    ),
    Method(
        "er-agem",
        "ER + A-GEM",
        "ER; gradients never oppose that of the replayed examples",
        lambda c: losses.Er(),
        rule=lambda build: proximal.AGEM.joint(build.model),
        replay=False,
    ),
    Method(
        "aop",
        "AOP",
        "stream only; gradients orthogonal to earlier inputs, more so as the stream goes on",
        lambda c: losses.Finetune(),
        rule=_aop,
        replay=False,
        uses=("projection.alpha", *_SCOPE_KEYS),
    ),
    Method(
        "owm",
        "OWM",
        "stream only; gradients orthogonal to earlier inputs",
        lambda c: losses.Finetune(),
        rule=_owm,
        replay=False,
        uses=("projection.alpha", *_SCOPE_KEYS),
        tuned_like=("aop",),
    ),
    Method(
        "gpm",
        "GPM",
        "stream only; gradients orthogonal to the main directions of remembered inputs",
        lambda c: losses.Finetune(),
        rule=_gpm,
        replay=False,
        uses=("projection.energy", *_SCOPE_KEYS, *_REFRESH_KEYS),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "sgp",
        "SGP",
        "as GPM, with directions scaled by their importance",
        lambda c: losses.Finetune(),
        rule=_sgp,
        replay=False,
        uses=("projection.energy", "projection.scale", *_SCOPE_KEYS, *_REFRESH_KEYS),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "iid",
        "i.i.d.",
        "the upper bound: ER on a stream in which all classes are mixed",
        lambda c: losses.Er(),
        replay=False,
        iid=True,
    ),
]

_PLAIN = [m for base in _BASE for m in ([base, _with_lpr(base)] if base.replay else [base])]
_AVERAGED = [_with_average(method) for method in _PLAIN if not method.averaged]
METHODS: Mapping[str, Method] = {method.name: method for method in (*_PLAIN, *_AVERAGED)}


def find_method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
        plain = ", ".join(method.name for method in _PLAIN)
        raise InputError(
            f"unknown method '{name}'; the nearest is '{near}', and there are {plain}; "
            f"{AVERAGED_SUFFIX} after a name averages its weights."
        )
    return METHODS[name]
