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
from proxreplay.options import KRONECKER_STEPS, CompanionOptions

if TYPE_CHECKING:
    from torch import nn

    from proxreplay import proximal
    from proxreplay.models import heads
    from proxreplay.replay import class_statistics as statistics
    from proxreplay.replay import losses
else:
    proximal = LazyModule("proxreplay.proximal")
    heads = LazyModule("proxreplay.models.heads")
    losses = LazyModule("proxreplay.replay.losses")
    statistics = LazyModule("proxreplay.replay.class_statistics")

LPR_PREFIX = "lpr-"
KLPR_PREFIX = "klpr-"
LONGER = 10.0  # learning rates of SGD: most of a gradient is in directions that KLPR shrinks
LONGER_FOR_LOGITS = 3.0  # squared differences of logits have no bound; 5 and 10 can diverge
AVERAGED_SUFFIX = "-avg"


Rule = Callable[["nn.Module", RunConfig, int], "proximal.GradientRule"]
"""From the model, the configuration and the SGD steps of the whole stream to a gradient rule."""


@dataclass(frozen=True)
class Method:
    """The parts that a method composes."""

    name: str  # as users write it
    label: str  # as the paper prints it
    about: str  # one line for people
    # from the configuration to the replay loss; by default experience replay
    loss: "Callable[[RunConfig], losses.Loss]" = lambda c: losses.er
    rule: Rule | None = None  # makes the gradient rule; None for plain SGD
    averaged: bool = False  # whether the weights are averaged for prediction
    # configuration values that make it what it is
    values: Mapping[str, Any] = field(default_factory=dict)
    # growing with a mask over unseen classes, or fixed with all classes
    head: Literal["growing", "fixed"] = "growing"
    uses: tuple[str, ...] = ()  # the configuration keys that matter to it beyond the common ones
    # methods whose settings it takes on a benchmark that has none for it
    tuned_like: tuple[str, ...] = ()
    longer: float = 1.0  # the learning rate, in those of the replay method that a benchmark has
    iid: bool = False  # whether the stream is put in random order, for the upper bound
    # whether its rule can be refreshed at task ends, from the task's examples
    task_ends: bool = False
    # from the configuration to the statistic that predicts in place of a trained network; a method
    # that such a floor beats has learned nothing of use
    floor: "Callable[[RunConfig], statistics.Statistic] | None" = None

    @property
    def takes_rules(self) -> bool:
        """Whether LPR can be added: it replays a stream as it comes, without a rule of its own."""
        return self.loss is not _finetune and not (self.rule or self.iid or self.floor)


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

    ``tau`` starts from ``lr`` and gains ``growth`` per step; ``beta`` is the share of a new step in
    the moving average; ``values`` are those of the loss.
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


def _basis(config: RunConfig) -> dict[str, Any]:
    """What GPM and SGP have in common."""
    accumulate = config.refresh.interval is None
    own = {"energy": config.projection.energy, "accumulate": accumulate}
    return own | _scope(config, task_ends=True)


_BASE = [
    Method("finetune", "Fine-tuning", "SGD on the stream alone", _finetune),
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
        uses=("projection.samples",),
    ),
    Method(
        "er-agem",
        "ER + A-GEM",
        "ER; gradients never oppose that of the replayed examples",
        rule=lambda m, c, steps: proximal.AGEM.joint(m),
    ),
    Method(
        "aop",
        "AOP",
        "stream only; gradients orthogonal to earlier inputs, more so as the stream goes on",
        _finetune,
        rule=_aop,
        uses=("projection.alpha", *_SCOPE_KEYS),
    ),
    Method(
        "owm",
        "OWM",
        "stream only; gradients orthogonal to earlier inputs",
        _finetune,
        rule=lambda m, c, steps: proximal.OWM(m, c.projection.alpha, **_scope(c)),
        uses=("projection.alpha", *_SCOPE_KEYS),
        tuned_like=("aop",),
    ),
    Method(
        "gpm",
        "GPM",
        "stream only; gradients orthogonal to the main directions of remembered inputs",
        _finetune,
        rule=lambda m, c, steps: proximal.GPM(m, **_basis(c)),
        uses=("projection.energy", *_SCOPE_KEYS, *_keys("refresh.")),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "sgp",
        "SGP",
        "as GPM, with directions scaled by their importance",
        _finetune,
        rule=lambda m, c, steps: proximal.SGP(m, scale=c.projection.scale, **_basis(c)),
        uses=("projection.energy", "projection.scale", *_SCOPE_KEYS, *_keys("refresh.")),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "iid",
        "i.i.d. (ceiling)",
        "the upper bound: ER on the same stream in random order, with as many steps",
        iid=True,
    ),
    Method(
        "majority",
        "Majority (floor)",
        "a floor, without training: always the most frequent class so far",
        floor=lambda c: statistics.ClassCounts(),
    ),
    Method(
        "ncm",
        "NCM (floor)",
        "a floor, without training: the nearest mean of each class's remembered inputs",
        floor=lambda c: statistics.ClassMeans(),
    ),
    Method(
        "slda",
        "Streaming LDA (floor)",
        "a floor, without training: class means and a shared covariance of random convolutional "
        "features",
        uses=_keys("floor."),
        floor=lambda c: statistics.SharedCovariance(c.floor),
    ),
]

_PLAIN = [
    method
    for base in _BASE
    for method in ([base, _with_lpr(base), _with_klpr(base)] if base.takes_rules else [base])
]
_OF_NAME = {base.name: base for base in _BASE}
_averaged = _with_average(_with_klpr(_OF_NAME["er"]))
_PLAIN += [
    _as_ocar(_OF_NAME["er"], 7.0e-4, 0.139, 3.7e-8, {}),
    _as_ocar(_OF_NAME["er-ace"], 4.3e-4, 0.0567, 5.7e-10, {"loss.alpha": 0.591}),
    dataclasses.replace(
        _averaged,
        name="anytime",
        label="Anytime",
        values={**_averaged.values, "companion.weight": CompanionOptions.weight},
        about="the recommended composition: KLPR (ER) averaged, with a companion",
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
