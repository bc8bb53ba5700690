"""Methods are recipes: which loss, rule, averaging and head a name stands for.

Declarations only: torch is imported when a loss or a rule is built.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from proxreplay.errors import InputError
from proxreplay.experiments.config import RunConfig, keys
from proxreplay.lazy import LazyModule
from proxreplay.options import KRONECKER_STEPS

if TYPE_CHECKING:
    from torch import nn

    from proxreplay import proximal
    from proxreplay.models import heads
    from proxreplay.replay import floors, losses
else:
    proximal = LazyModule("proxreplay.proximal")
    heads = LazyModule("proxreplay.models.heads")
    losses = LazyModule("proxreplay.replay.losses")
    floors = LazyModule("proxreplay.replay.floors")

LPR_PREFIX = "lpr-"
KLPR_PREFIX = "klpr-"
LONGER = 10.0  # learning rates of SGD: most of a gradient is in directions that KLPR shrinks
LONGER_FOR_LOGITS = 3.0  # squared differences of logits have no bound; 5 and 10 can diverge
AVERAGED_SUFFIX = "-avg"


Rule = Callable[["nn.Module", RunConfig, int], "proximal.GradientRule"]
"""From the model, the configuration and the SGD steps of the whole stream to a gradient rule."""


@dataclass(frozen=True)
class Method:
    """The parts that a method composes.

    Args:
        name: as users write it.
        label: as the paper prints it.
        about: one line for people.
        loss: from the configuration to the replay loss; by default experience replay.
        rule: makes the gradient rule; None for plain SGD.
        averaged: whether the weights are averaged for prediction.
        values: configuration values that make it what it is.
        head: ``growing`` with a mask over unseen classes, or ``fixed`` with all classes.
        replay: whether it replays, so that LPR can be added to it.
        uses: the configuration keys that matter to it beyond the common ones.
        tuned_like: methods whose settings it takes on a benchmark that has none for it.
        longer: the learning rate, in those of the replay method that a benchmark has.
        iid: whether the stream is put in random order, for the upper bound.
        task_ends: whether its rule can be refreshed at task ends, from the task's examples.
        floor: from the configuration to the statistic that predicts in place of a trained network.
    """

    name: str
    label: str
    about: str
    loss: "Callable[[RunConfig], losses.Loss]" = lambda c: losses.er
    rule: Rule | None = None
    averaged: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    head: Literal["growing", "fixed"] = "growing"
    replay: bool = True
    uses: tuple[str, ...] = ()
    tuned_like: tuple[str, ...] = ()
    longer: float = 1.0
    iid: bool = False
    task_ends: bool = False
    floor: "Callable[[RunConfig], floors.Statistic] | None" = None


def _finetune(config: RunConfig) -> "losses.Loss":
    return losses.finetune


def _keys(*sections: str) -> tuple[str, ...]:
    """Every key of these sections of the configuration."""
    return tuple(key for key in keys() if key.startswith(sections))


_SCOPE_KEYS = ("projection.norms", "projection.head")


def _lpr(model: "nn.Module", config: RunConfig, steps: int) -> "proximal.GradientRule":
    own = dataclasses.asdict(config.lpr)
    if own["statistics"] == "step":
        own["statistics"] = config.step
    return proximal.LPR(model, **own)


def _with_lpr(base: Method) -> Method:
    return dataclasses.replace(
        base,
        name=LPR_PREFIX + base.name,
        label=f"LPR ({base.label})",
        about=f"{base.label} with gradients preconditioned by LPR",
        rule=_lpr,
        uses=(*base.uses, *_keys("lpr.", "refresh.", "step.")),
    )


def _kronecker(model: "nn.Module", config: RunConfig, steps: int) -> "proximal.GradientRule":
    own = dataclasses.asdict(config.klpr)
    return proximal.KroneckerLPR(model, **own, steps=config.step, seed=config.seed)


def _with_klpr(base: Method) -> Method:
    steps = dataclasses.asdict(KRONECKER_STEPS)
    return dataclasses.replace(
        base,
        name=KLPR_PREFIX + base.name,
        label=f"KLPR ({base.label})",
        about=f"{base.label} with gradients preconditioned from both sides",
        rule=_kronecker,
        values={**base.values, **{f"step.{key}": value for key, value in steps.items()}},
        longer=LONGER_FOR_LOGITS if "loss.logit_weight" in base.uses else LONGER,
        uses=(*base.uses, *_keys("klpr.", "step.")),
    )


def _as_ocar(
    base: Method, lr: float, beta: float, growth: float, values: Mapping[str, Any]
) -> Method:
    """OCAR with the settings that its authors chose on Split-CIFAR100 (docs/rules.md).

    Args:
        base: the replay method.
        lr: from which tau starts.
        beta: share of a new step in the moving average.
        growth: of tau per step.
        values: of the loss.
    """
    damping = {"tau": lr, "tau_growth": growth, "tolerance": 0.0, "form": "inverses"}
    steps = {"every": 3, "rebuild": 1, "decay": 1 - beta, "incoming": 1.0, "balance": True}
    return dataclasses.replace(
        base,
        name="ocar-" + base.name,
        label=f"OCAR ({base.label})",
        about=f"{base.label} in the metric of the predictions, as published",
        rule=_kronecker,
        values={
            **{f"klpr.{key}": value for key, value in damping.items()},
            **{"klpr.fisher": "exact", "klpr.norms": "plain", "lr": lr, **values},
            **{f"step.{key}": value for key, value in steps.items()},
        },
        uses=(*base.uses, *_keys("klpr.", "step.")),
    )


def _with_average(base: Method) -> Method:
    return dataclasses.replace(
        base,
        name=base.name + AVERAGED_SUFFIX,
        label=f"{base.label} averaged",
        about=f"{base.label}; an average of the weights predicts too",
        averaged=True,
        uses=(*base.uses, *_keys("averaging.", "distillation.")),
    )


def _scope(config: RunConfig, *, task_ends: bool = False) -> dict[str, Any]:
    """Which layers a projection leaves alone, or freezes at the first task end."""
    own = config.projection
    if own.norms == "freeze" and not task_ends:
        raise InputError(
            f"projection.norms=freeze: {config.method} has no task ends at which to freeze; give "
            "plain or treat."
        )
    return {"norms": own.norms, "exclude": (heads.GrowingHead,) if own.head == "free" else ()}


def _aop(model: "nn.Module", config: RunConfig, steps: int) -> "proximal.GradientRule":
    alpha: Any = config.projection.alpha
    if alpha is None:
        alpha = proximal.AdaptiveAlpha(proximal.StreamProgress(steps))
    return proximal.AOP(model, alpha, **_scope(config))


def _gpm(model: "nn.Module", config: RunConfig, steps: int) -> "proximal.GradientRule":
    accumulate, scope = config.refresh.interval is None, _scope(config, task_ends=True)
    return proximal.GPM(model, config.projection.energy, accumulate=accumulate, **scope)


def _sgp(model: "nn.Module", config: RunConfig, steps: int) -> "proximal.GradientRule":
    own, scope = config.projection, _scope(config, task_ends=True)
    accumulate = config.refresh.interval is None
    return proximal.SGP(model, own.energy, scale=own.scale, accumulate=accumulate, **scope)


def _floor(
    name: str,
    label: str,
    about: str,
    statistic: "Callable[[RunConfig], floors.Statistic]",
    uses: tuple[str, ...] = (),
) -> Method:
    """A classifier that learns no weights; a method that it beats has learned nothing of use."""
    about = f"a floor, without training: {about}"
    label = f"{label} (floor)"
    return Method(name, label, about, replay=False, uses=uses, floor=statistic)


_BASE = [
    Method("finetune", "Fine-tuning", "SGD on the stream alone", _finetune, replay=False),
    Method("er", "ER", "experience replay, one joint forward pass"),
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
        averaged=True,
        values={"averaging.start": "copy", "averaging.predict": "average"},
        uses=_keys("averaging."),
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
        _finetune,
        rule=lambda m, c, steps: proximal.AGEM(m, samples=c.projection.samples),
        replay=False,
        uses=("projection.samples",),
    ),
    Method(
        "er-agem",
        "ER + A-GEM",
        "ER; gradients never oppose that of the replayed examples",
        rule=lambda m, c, steps: proximal.AGEM.joint(m),
        replay=False,
    ),
    Method(
        "aop",
        "AOP",
        "stream only; gradients orthogonal to earlier inputs, more so as the stream goes on",
        _finetune,
        rule=_aop,
        replay=False,
        uses=("projection.alpha", *_SCOPE_KEYS),
    ),
    Method(
        "owm",
        "OWM",
        "stream only; gradients orthogonal to earlier inputs",
        _finetune,
        rule=lambda m, c, steps: proximal.OWM(m, c.projection.alpha, **_scope(c)),
        replay=False,
        uses=("projection.alpha", *_SCOPE_KEYS),
        tuned_like=("aop",),
    ),
    Method(
        "gpm",
        "GPM",
        "stream only; gradients orthogonal to the main directions of remembered inputs",
        _finetune,
        rule=_gpm,
        replay=False,
        uses=("projection.energy", *_SCOPE_KEYS, *_keys("refresh.")),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "sgp",
        "SGP",
        "as GPM, with directions scaled by their importance",
        _finetune,
        rule=_sgp,
        replay=False,
        uses=("projection.energy", "projection.scale", *_SCOPE_KEYS, *_keys("refresh.")),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "iid",
        "i.i.d. (ceiling)",
        "the upper bound: ER on the same stream in random order, with as many steps",
        replay=False,
        iid=True,
    ),
    _floor(
        "majority",
        "Majority",
        "always the most frequent class so far",
        lambda c: floors.ClassCounts(),
    ),
    _floor(
        "ncm",
        "NCM",
        "the nearest mean of each class's remembered inputs",
        lambda c: floors.ClassMeans(),
    ),
    _floor(
        "slda",
        "Streaming LDA",
        "class means and a shared covariance of random convolutional features",
        lambda c: floors.SharedCovariance(c.floor),
        ("floor.filters", "floor.shrinkage"),
    ),
]

_PLAIN = [
    method
    for base in _BASE
    for method in ([base, _with_lpr(base), _with_klpr(base)] if base.replay else [base])
]
_OF_NAME = {base.name: base for base in _BASE}
_PLAIN += [
    _as_ocar(_OF_NAME["er"], 7.0e-4, 0.139, 3.7e-8, {}),
    _as_ocar(_OF_NAME["er-ace"], 4.3e-4, 0.0567, 5.7e-10, {"loss.alpha": 0.591}),
    dataclasses.replace(
        _with_average(_with_klpr(_OF_NAME["er"])),
        name="anytime",
        label="Anytime",
        about="the recommended composition: KLPR (ER) averaged",
    ),
]
_AVERAGED = [_with_average(method) for method in _PLAIN if not (method.averaged or method.floor)]
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
