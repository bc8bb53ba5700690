"""What a run will cost, before it is made: counted exactly, timed by a short calibration."""

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from proxreplay.data import Stream
from proxreplay.evaluation import evaluate
from proxreplay.experiments.build import build_learner, build_stream
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.configure import declared
from proxreplay.experiments.environment import threads
from proxreplay.experiments.run import evaluation_due
from proxreplay.proximal.rules.layerwise import LayerwiseRule
from proxreplay.replay import Learner
from proxreplay.replay.floors import Floor


@dataclass(frozen=True)
class RunPlan:
    """What a run does and about how long it takes."""

    tasks: int  # how many
    stream_batches: int  # in all; the short ones are only remembered
    trained_batches: int  # those that SGD steps are made on
    sgd_steps: int  # in all
    refreshes: int  # of the rule; 0 without one
    fewer: bool  # whether some of them may be left out
    evaluations: int  # moments at which validation examples are looked at
    evaluated_images: int  # in all of them, and at the end
    parameters: int  # of the network, at the end of calibration
    memory_bytes: int  # of the replay memory when full
    rule_bytes: int  # of the rule's factors
    companion_bytes: int  # of the companion, once all classes have come; 0 without one
    seconds: dict[str, float]  # estimate: learning, refreshing, evaluating

    def described(self) -> list[tuple[str, str]]:
        """Lines for people: what, how much."""
        total = sum(self.seconds.values())
        shares = ", ".join(f"{name} {_duration(spent)}" for name, spent in self.seconds.items())
        batches = f"{self.stream_batches:,}, of which {self.trained_batches:,} trained"
        companion = ("companion", f"at most {self.companion_bytes / 2**20:.1f} MiB")
        return [
            ("tasks", f"{self.tasks:,}"),
            ("stream batches", batches),
            ("SGD steps", f"{self.sgd_steps:,}"),
            ("refreshes", "at most " * self.fewer + f"{self.refreshes:,}"),
            ("evaluations", f"{self.evaluations:,}, {self.evaluated_images:,} images"),
            ("parameters", f"{self.parameters:,}"),
            ("replay memory", f"{self.memory_bytes / 2**20:.1f} MiB"),
            ("rule's factors", f"{self.rule_bytes / 2**20:.1f} MiB"),
            *([companion] if self.companion_bytes else []),
            ("estimated time", f"{_duration(total)} ({shares})"),
        ]


def _duration(seconds: float) -> str:
    """A duration for people.

    >>> _duration(7), _duration(150), _duration(7300)
    ('7 s', '2.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def plan(config: RunConfig, data_root: Path | None = None, batches: int = 12) -> RunPlan:
    """Count what a run would do, and time a few of its batches to say how long it would take.

    So many ``batches`` are learned and thrown away.
    """
    benchmark = declared(config)
    dataset = benchmark.load(data_root)
    stream = build_stream(config, benchmark, dataset)
    learner = build_learner(config, benchmark, dataset, stream)
    due = [p for p in range(len(stream)) if evaluation_due(stream, p, config.eval_every)]
    held_out = list(itertools.accumulate(len(task.validation) for task in stream.tasks))
    images = sum(held_out[stream.task_at(p)] for p in due)
    images *= 2 if learner.averaging is not None else 1
    sizes = [len(task.train) for task in stream.tasks]
    full = config.capacity or sum(sizes)
    if config.refresh.interval is None:
        refreshes, at_most = sum(map(stream.ends_task, range(len(stream)))), max(sizes)
    else:
        refreshes, at_most = stream.trained_batches // config.refresh.interval, full
    if learner.rule is None or not learner.rule.needs_refresh:
        refreshes = 0
    with threads(config.threads):
        per_batch = _time_batches(learner, stream, batches)
        per_refresh = _time_refresh(learner, config.refresh.samples or at_most)
        per_image = _time_evaluation(learner, stream)
    layers = learner.rule.layers if isinstance(learner.rule, LayerwiseRule) else {}
    return RunPlan(
        tasks=len(stream.tasks),
        stream_batches=len(stream),
        trained_batches=stream.trained_batches,
        sgd_steps=stream.trained_batches * config.steps_per_batch,
        refreshes=refreshes,
        fewer=isinstance(learner, Learner) and learner.stretches,
        evaluations=len(due),
        evaluated_images=images,
        parameters=sum(p.numel() for p in learner.model.parameters()),
        memory_bytes=learner.memory.row_nbytes * full,
        rule_bytes=sum(layer.bytes for layer in layers.values()),
        companion_bytes=_companion_bytes(learner, stream),
        seconds={
            "learning": per_batch * stream.trained_batches,
            "refreshing": per_refresh * refreshes,
            "evaluating": per_image * images,
        },
    )


def _companion_bytes(learner: Learner | Floor, stream: Stream) -> int:
    if not isinstance(learner, Learner) or learner.companion is None:
        return 0
    labels = torch.cat([stream.arriving(t).labels for t in range(len(stream.tasks))])
    return learner.companion.nbytes(len(labels.unique()))


def _time_batches(learner: Learner | Floor, stream: Stream, batches: int) -> float:
    """Median seconds per batch that SGD steps are made on, without refreshes where that can be."""
    times: list[tuple[bool, float]] = []
    for batch in stream:
        start = time.perf_counter()
        refreshed = learner.learn(batch).refreshed is not None
        if batch.train:
            times.append((refreshed, time.perf_counter() - start))
        if len(times) == batches:
            break
    plain = [spent for refreshed, spent in times if not refreshed]
    return statistics.median(plain or [spent for _, spent in times])


def _time_refresh(learner: Learner | Floor, examples: int) -> float:
    """Seconds per refresh over so many examples, extrapolated from two smaller ones."""
    if isinstance(learner, Floor) or learner.rule is None:
        return 0.0
    seconds = []
    sizes = (-(-len(learner.memory) // 2), len(learner.memory))
    whole = learner.refresh_samples
    for size in sizes:
        learner.refresh_samples = size
        start = time.perf_counter()
        learner.refresh()
        seconds.append(time.perf_counter() - start)
    learner.refresh_samples = whole
    per_example = max(seconds[1] - seconds[0], 0.0) / max(sizes[1] - sizes[0], 1)
    return seconds[1] + (examples - sizes[1]) * per_example


def _time_evaluation(learner: Learner | Floor, stream: Stream) -> float:
    """Seconds per image."""
    examples = stream.tasks[0].validation
    start = time.perf_counter()
    evaluate(learner.logits, [examples])
    return (time.perf_counter() - start) / len(examples)
