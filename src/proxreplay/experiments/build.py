"""From a configuration to what a run is made of: stream, network and learner."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from proxreplay.data import Dataset, Stream
from proxreplay.data.scenarios import ShortLast
from proxreplay.data.streams import Subset
from proxreplay.data.tasks import mixed
from proxreplay.distributed import current
from proxreplay.errors import InputError
from proxreplay.experiments.benchmarks import Benchmark
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.recipes import AVERAGED_SUFFIX, METHODS, Method, find_method
from proxreplay.models import load_network
from proxreplay.replay import (
    ClassBalancedMemory,
    Distilled,
    Learner,
    Loss,
    Memory,
    Observer,
    UnlimitedMemory,
)
from proxreplay.replay.class_statistics import Statistic
from proxreplay.replay.floors import Floor
from proxreplay.replay.placement import usable_device
from proxreplay.seeding import seeded


def build_stream(config: RunConfig, benchmark: Benchmark, dataset: Dataset) -> Stream:
    """The stream that the configuration's seed gives."""
    short_last = cast(ShortLast, config.stream.short_last)
    stream = benchmark.scenario.stream(dataset, config.seed, config.batch_size, short_last)
    first, limit = config.stream.first, config.stream.limit
    mix = find_method(config.method).iid
    if first is None and limit is None and not mix:
        return stream
    tasks = [
        replace(task, train=Subset(task.train.source, task.train.rows[:limit]))
        for task in stream.tasks[:first]
    ]
    return Stream(mixed(tasks, config.seed) if mix else tasks, config.batch_size, short_last)


def build_network(config: RunConfig, benchmark: Benchmark, dataset: Dataset) -> nn.Module:
    """The network with the initial weights that the configuration's seed gives."""
    fixed = find_method(config.method).head == "fixed"
    outputs = len(dataset.classes) if fixed else None
    with seeded(config.seed, "model"):
        if config.network is None:
            return benchmark.network(outputs)
        shape = dataset.train.inputs.shape[1:]
        channels = shape[0] if len(shape) == 3 else 1
        return load_network(config.network, outputs, channels, shape[-1], shape.numel())


def build_learner(
    config: RunConfig,
    benchmark: Benchmark,
    dataset: Dataset,
    stream: Stream,
    observers: Sequence[Observer] = (),
) -> Learner | Floor:
    """Compose the parts that the configuration's method names."""
    method = find_method(config.method)
    if method.floor is not None:
        return _floor(config, benchmark, dataset, method.floor(config))
    steps = stream.trained_batches * config.steps_per_batch
    network = build_network(config, benchmark, dataset).to(usable_device(config.device))
    return Learner(
        network,
        _memory(config),
        None if method.rule is None else method.rule(network, config, steps),
        loss=_loss(config, method),
        averaging=config.averaging if method.averaged else None,
        companion=config.companion,
        lr=config.lr,
        steps_per_batch=config.steps_per_batch,
        replay_batch=config.replay_batch,
        refresh_every=_refresh_every(config),
        refresh_samples=config.refresh.samples,
        transform=benchmark.transform,
        compile=config.compile,
        observers=observers,
        processes=current().holding(replicated=True),
        seed=config.seed,
    )


def _floor(
    config: RunConfig, benchmark: Benchmark, dataset: Dataset, statistic: Statistic
) -> Floor:
    if config.diagnostics.drift is not None:
        raise InputError(
            f"diagnostics.drift={config.diagnostics.drift}: {config.method} trains no network that "
            "could drift; leave it out."
        )
    shape, device = tuple(dataset.train.inputs.shape[1:]), usable_device(config.device)
    with seeded(config.seed, "model"):
        memory = _memory(config)
        return Floor(statistic, memory, shape, benchmark.transform, device, config.seed)


def _memory(config: RunConfig) -> Memory:
    parts = current() if config.sharded else None
    if config.capacity is None:
        return UnlimitedMemory(shared_by=parts)
    return ClassBalancedMemory(config.capacity, shared_by=parts)


def _loss(config: RunConfig, method: Method) -> Loss:
    """The replay loss of the method, with the average as a teacher if that is asked for."""
    own = config.distillation
    if own.weight == 0:
        return method.loss(config)
    if not method.averaged:
        raise InputError(
            f"distillation.weight={own.weight}: {method.name} has no average to be taught by; use "
            f"{method.name}{AVERAGED_SUFFIX}."
        )
    return Distilled(method.loss(config), own.weight, own.temperature, own.on)


def _refresh_every(config: RunConfig) -> int | None:
    """Stream batches between refreshes from the memory; None for none."""
    if config.refresh.interval is None and not find_method(config.method).task_ends:
        able = " and ".join(n for n, m in METHODS.items() if m.task_ends and not m.averaged)
        raise InputError(
            f"refresh.every=task: only {able} can be refreshed at the ends of tasks, not "
            f"{config.method}. Give a number of stream batches."
        )
    return config.refresh.interval
