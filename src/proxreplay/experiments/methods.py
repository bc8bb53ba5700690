"""Methods are recipes: which loss, memory, rule, averaging and head a name stands for."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import nn

from proxreplay.data import Dataset, Stream
from proxreplay.data.scenarios import (
    IID,
    Blurry,
    ClassIncremental,
    DomainIncremental,
    Scenario,
    ShortLast,
)
from proxreplay.data.streams import Subset
from proxreplay.errors import InputError
from proxreplay.experiments.benchmarks import (
    LPR_PREFIX,
    Benchmark,
    MethodSettings,
    default_settings,
    find_benchmark,
)
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.custom import custom
from proxreplay.models import load_network
from proxreplay.models.heads import GrowingHead
from proxreplay.proximal import AGEM, AOP, GPM, LPR, OWM, SGP, AdaptiveAlpha, StreamProgress
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay import ClassBalancedMemory, Learner, UnlimitedMemory
from proxreplay.replay.averaging import EMA
from proxreplay.replay.learner import REFRESH_SAMPLES
from proxreplay.replay.losses import Derpp, DerppSnapshot, Er, ErAce, Finetune, Lode, Loss
from proxreplay.seeding import seeded

CUSTOM = "custom"


@dataclass(frozen=True)
class Defaults:
    """What a benchmark of one's own starts from."""

    memory: int = 500
    steps_per_batch: int = 3
    settings: Mapping[str, MethodSettings] = field(default_factory=lambda: default_settings(0.05))


CUSTOM_DEFAULTS = Defaults()


@dataclass(frozen=True)
class RuleInputs:
    """What a gradient rule is built from.

    Args:
        model: whose gradients it changes.
        config: of the run.
        steps: SGD steps of the whole stream, for schedules over it.
    """

    model: nn.Module
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
        averaged: whether an average of the weights predicts.
        head: ``growing`` with a mask over unseen classes, or ``fixed`` with all classes.
        replay: whether it replays, so that LPR can be put before it.
        uses: the configuration keys that matter to it beyond the common ones.
        tuned_like: methods whose settings it takes on a benchmark that has none for it.
        iid: whether it learns from all classes mixed, as the ceiling.
        task_ends: whether its rule can be refreshed at task ends, from the task's examples.
    """

    name: str
    label: str
    about: str
    loss: Callable[[RunConfig], Loss]
    rule: Callable[[RuleInputs], GradientRule] | None = None
    averaged: bool = False
    head: Literal["growing", "fixed"] = "growing"
    replay: bool = True
    uses: tuple[str, ...] = ()
    tuned_like: tuple[str, ...] = ()
    iid: bool = False
    task_ends: bool = False


LPR_KEYS = (
    "lpr.omega_0",
    "lpr.beta",
    "lpr.tolerance",
    "lpr.rolling",
    "lpr.reference",
    "refresh.every",
    "refresh.samples",
)
GPM_KEYS = ("projection.norms", "projection.head", "refresh.every", "refresh.samples")


def _lpr(build: RuleInputs) -> GradientRule:
    own = build.config.lpr
    return LPR(
        build.model,
        own.omega_0,
        own.beta,
        reference=cast(Literal["paper", "authors"], own.reference),
        tolerance=own.tolerance,
        rolling=own.rolling,
    )


def _with_lpr(base: Method) -> Method:
    return Method(
        name=LPR_PREFIX + base.name,
        label=f"LPR ({base.label})",
        about=f"{base.label} with gradients preconditioned by LPR",
        loss=base.loss,
        rule=_lpr,
        averaged=base.averaged,
        head=base.head,
        tuned_like=base.tuned_like,
        uses=(*base.uses, *LPR_KEYS),
    )


def _aop(build: RuleInputs) -> GradientRule:
    alpha = build.config.projection.alpha
    schedule = AdaptiveAlpha(StreamProgress(build.steps)) if alpha is None else alpha
    norms, exclude = _kept_norms(build.config), _left_free(build.config)
    return AOP(build.model, schedule, norms=norms, exclude=exclude)


def _owm(build: RuleInputs) -> GradientRule:
    alpha = build.config.projection.alpha
    norms, exclude = _kept_norms(build.config), _left_free(build.config)
    return OWM(build.model, 1e-3 if alpha is None else alpha, norms=norms, exclude=exclude)


def _gpm(build: RuleInputs) -> GradientRule:
    own = build.config.projection
    return GPM(
        build.model,
        own.energy,
        accumulate=build.config.refresh.interval is None,
        norms=_norms(build.config),
        exclude=_left_free(build.config),
    )


def _sgp(build: RuleInputs) -> GradientRule:
    own = build.config.projection
    return SGP(
        build.model,
        own.energy,
        scale=own.scale,
        accumulate=build.config.refresh.interval is None,
        norms=_norms(build.config),
        exclude=_left_free(build.config),
    )


def _left_free(config: RunConfig) -> tuple[type[nn.Module], ...]:
    return (GrowingHead,) if config.projection.head == "free" else ()


def _norms(config: RunConfig) -> Literal["plain", "treat", "freeze"]:
    return cast(Literal["plain", "treat", "freeze"], config.projection.norms)


def _kept_norms(config: RunConfig) -> Literal["plain", "treat"]:
    if config.projection.norms == "freeze":
        raise InputError(
            f"projection.norms=freeze: {config.method} has no task ends at which to freeze; give "
            "plain or treat."
        )
    return cast(Literal["plain", "treat"], config.projection.norms)


_BASE = [
    Method(
        "finetune", "Fine-tuning", "SGD on the stream alone", lambda c: Finetune(), replay=False
    ),
    Method("er", "ER", "experience replay, one joint forward", lambda c: Er()),
    Method(
        "er-ace",
        "ER-ACE",
        "incoming examples compete among their own classes only",
        lambda c: ErAce(c.loss.alpha),
        uses=("loss.alpha",),
        tuned_like=("lode",),
    ),
    Method(
        "der",
        "DER",
        "logits of a lagging snapshot are kept, as in the paper's experiments",
        lambda c: DerppSnapshot(c.loss.replay_weight, c.loss.logit_weight, c.loss.teacher_every),
        head="fixed",
        uses=("loss.replay_weight", "loss.logit_weight", "loss.teacher_every"),
    ),
    Method(
        "derpp",
        "DER++",
        "logits stored with each example are kept",
        lambda c: Derpp(c.loss.replay_weight, c.loss.logit_weight),
        head="fixed",
        uses=("loss.replay_weight", "loss.logit_weight"),
        tuned_like=("der",),
    ),
    Method(
        "ema",
        "EMA",
        "experience replay, an average of the weights predicts",
        lambda c: Er(),
        averaged=True,
        uses=("ema.momentum",),
    ),
    Method(
        "lode",
        "LODE",
        "telling new classes apart and from old ones, weighed apart",
        lambda c: Lode(c.loss.rho),
        uses=("loss.rho",),
    ),
    Method(
        "agem",
        "A-GEM",
        "the stream alone, never against the gradient of remembered examples",
        lambda c: Finetune(),
        rule=lambda build: AGEM(build.model, samples=build.config.projection.samples),
        replay=False,
        uses=("projection.samples",),
    ),
    Method(
        "er-agem",
        "ER + A-GEM",
        "experience replay, never against the gradient of what is replayed",
        lambda c: Er(),
        rule=lambda build: AGEM.joint(build.model),
        replay=False,
    ),
    Method(
        "aop",
        "AOP",
        "the stream alone, old inputs closed, the more the further the stream",
        lambda c: Finetune(),
        rule=_aop,
        replay=False,
        uses=("projection.alpha", "projection.norms", "projection.head"),
    ),
    Method(
        "owm",
        "OWM",
        "the stream alone, old inputs closed",
        lambda c: Finetune(),
        rule=_owm,
        replay=False,
        uses=("projection.alpha", "projection.norms", "projection.head"),
        tuned_like=("aop",),
    ),
    Method(
        "gpm",
        "GPM",
        "the stream alone, the main directions of remembered inputs closed",
        lambda c: Finetune(),
        rule=_gpm,
        replay=False,
        uses=("projection.energy", *GPM_KEYS),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "sgp",
        "SGP",
        "as GPM, directions closed by their importance",
        lambda c: Finetune(),
        rule=_sgp,
        replay=False,
        uses=("projection.energy", "projection.scale", *GPM_KEYS),
        task_ends=True,
        tuned_like=("aop",),
    ),
    Method(
        "iid",
        "i.i.d.",
        "the ceiling: ER on a stream in which all classes are mixed",
        lambda c: Er(),
        replay=False,
        iid=True,
    ),
]

METHODS: Mapping[str, Method] = {
    method.name: method
    for base in _BASE
    for method in ([base, _with_lpr(base)] if base.replay else [base])
}


def find_method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
        raise InputError(
            f"unknown method '{name}'; the nearest is '{near}', and there are {', '.join(METHODS)}."
        )
    return METHODS[name]


def configure(benchmark_name: str, method_name: str, *layers: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run: defaults < benchmark < method < each further layer.

    Args:
        benchmark_name: decides memory, steps a batch, and the method's hyper-parameters on it.
        method_name: decides what is composed.
        layers: values by dotted key, the later ones stronger (a file, then ``--set``).
    """
    method = find_method(method_name)
    defaults = CUSTOM_DEFAULTS if benchmark_name == CUSTOM else find_benchmark(benchmark_name)
    config = RunConfig(benchmark_name, method.name).with_values(
        {"memory": defaults.memory, "steps_per_batch": defaults.steps_per_batch}
    )
    config = config.with_values(_tuned(defaults.settings, method))
    if method.name.startswith(LPR_PREFIX):
        config = config.with_values({"refresh.samples": REFRESH_SAMPLES})
    for values in layers:
        config = config.with_values(values)
    if (config.benchmark, config.method) != (benchmark_name, method.name):
        raise InputError(
            f"the configuration is of {config.method} on {config.benchmark}, but {method.name} on "
            f"{benchmark_name} was asked for."
        )
    return config


def _tuned(settings: Mapping[str, MethodSettings], method: Method) -> dict[str, Any]:
    """A benchmark's settings for a method, as configuration values."""
    base = method.name.removeprefix(LPR_PREFIX)
    chosen = next(settings[name] for name in (base, *method.tuned_like, "er") if name in settings)
    replay_weight, logit_weight = chosen.der_weights or (None, None)
    values = {
        "lr": chosen.lr,
        "lpr.omega_0": chosen.omega_0,
        "lpr.beta": chosen.beta,
        "loss.replay_weight": replay_weight,
        "loss.logit_weight": logit_weight,
        "loss.rho": chosen.rho,
        "ema.momentum": chosen.ema_momentum,
    }
    return {key: value for key, value in values.items() if value is not None}


def declared(config: RunConfig) -> Benchmark:
    """The benchmark of a configuration, with what the configuration changes about it."""
    chosen = config.stream
    if config.benchmark != CUSTOM:
        if chosen.data is not None:
            raise InputError(
                f"stream.data={chosen.data} goes with the benchmark '{CUSTOM}', not with "
                f"'{config.benchmark}'."
            )
        if chosen.image_size is not None or not chosen.augment:
            raise InputError(
                f"stream.image_size and stream.augment go with the benchmark '{CUSTOM}'; "
                f"'{config.benchmark}' fixes both."
            )
        benchmark = find_benchmark(config.benchmark)
    elif chosen.data is None:
        raise InputError("custom: which data? Give --data with a folder, a zip or an .npz file.")
    else:
        benchmark = custom(
            chosen.data,
            tasks=chosen.tasks,
            scenario=_scenario(config, None),
            network=config.network,
            image_size=chosen.image_size,
            augment=chosen.augment,
        )
    return replace(benchmark, scenario=_scenario(config, benchmark.scenario) or benchmark.scenario)


def _scenario(config: RunConfig, own: Scenario | None) -> Scenario | None:
    """The scenario that the configuration asks for; the benchmark's own if it asks for none."""
    chosen, method = config.stream, find_method(config.method)
    tasks = chosen.tasks or getattr(own, "tasks", None)
    name = "iid" if method.iid else chosen.scenario
    if name == "iid":
        return IID(tasks or 1)
    if name in ("class", "blurry"):
        if tasks is None:
            raise InputError(f"stream.scenario={name}: say how many tasks with stream.tasks.")
        if name == "class":
            return ClassIncremental(tasks)
        return Blurry(tasks, chosen.disjoint, chosen.blur)
    if name == "domain":
        return own if isinstance(own, DomainIncremental) else DomainIncremental()
    if chosen.tasks is not None and isinstance(own, ClassIncremental):
        return ClassIncremental(chosen.tasks)
    if chosen.tasks is not None and own is not None:
        raise InputError(
            f"stream.tasks={chosen.tasks}: the tasks of {config.benchmark} are its domains; leave "
            "it out, or choose stream.scenario=class."
        )
    return own


def build_stream(config: RunConfig, benchmark: Benchmark, dataset: Dataset) -> Stream:
    """The stream that the configuration's seed gives."""
    short_last = cast(ShortLast, config.stream.short_last)
    stream = benchmark.stream(dataset, config.seed, config.batch_size, short_last)
    first, limit = config.stream.first, config.stream.limit
    if first is None and limit is None:
        return stream
    tasks = [
        replace(task, train=Subset(task.train.source, task.train.rows[:limit]))
        for task in stream.tasks[:first]
    ]
    return Stream(tasks, config.batch_size, short_last)


def build_network(config: RunConfig, benchmark: Benchmark, dataset: Dataset) -> nn.Module:
    """The network with the initial weights that the configuration's seed gives."""
    fixed = find_method(config.method).head == "fixed"
    outputs = len(dataset.classes) if fixed else None
    with seeded(config.seed, "model"):
        if config.network is None or config.benchmark == CUSTOM:
            return benchmark.network(outputs)
        shape = dataset.train.inputs.shape[1:]
        channels = shape[0] if len(shape) == 3 else 1
        return load_network(config.network, outputs, in_channels=channels, image_size=shape[-1])


def build_learner(
    config: RunConfig, benchmark: Benchmark, dataset: Dataset, stream: Stream
) -> Learner:
    """Compose the parts that the configuration's method names."""
    method = find_method(config.method)
    steps = stream.trained_batches * config.steps_per_batch
    network = build_network(config, benchmark, dataset).to(torch.device(config.device))
    return Learner(
        network,
        UnlimitedMemory() if config.memory is None else ClassBalancedMemory(config.memory),
        method.rule(RuleInputs(network, config, steps)) if method.rule is not None else None,
        loss=method.loss(config),
        averaging=EMA(network, config.ema.momentum) if method.averaged else None,
        lr=config.lr,
        steps_per_batch=config.steps_per_batch,
        replay_batch=config.replay_batch,
        refresh_every=_refresh_every(config, stream),
        refresh_samples=config.refresh.samples,
        transform=benchmark.transform,
        compile=config.compile,
        seed=config.seed,
    )


def _refresh_every(config: RunConfig, stream: Stream) -> int:
    """Stream batches between refreshes from the memory; more than there are, for none."""
    if config.refresh.interval is not None:
        return config.refresh.interval
    if not find_method(config.method).task_ends:
        able = " and ".join(method.name for method in METHODS.values() if method.task_ends)
        raise InputError(
            f"refresh.every=task: {config.method} makes nothing of the ends of tasks; only {able} "
            "do. Give a number of stream batches."
        )
    return len(stream) + 1
