"""What a run will cost, before it is made: counted exactly, timed by a short calibration."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

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
    """What a run does and about how long it takes.

    Args:
        tasks: how many.
        stream_batches: in all; the short ones are only remembered.
        trained_batches: those that SGD steps are made on.
        sgd_steps: in all.
        refreshes: of the rule; 0 without one.
        fewer: whether some of them may be left out.
        evaluations: moments at which validation examples are looked at.
        evaluated_images: in all of them, and at the end.
        parameters: of the network, at the end of calibration.
        memory_bytes: of the replay memory when full.
        rule_bytes: of the rule's factors.
        seconds: estimate: learning, refreshing, evaluating.
    """

    tasks: int
    stream_batches: int
    trained_batches: int
    sgd_steps: int
    refreshes: int
    fewer: bool
    evaluations: int
    evaluated_images: int
    parameters: int
    memory_bytes: int
    rule_bytes: int
    seconds: dict[str, float]

    def described(self) -> list[tuple[str, str]]:
        """Lines for people: what, how much."""
        total = sum(self.seconds.values())
        shares = ", ".join(f"{name} {_duration(spent)}" for name, spent in self.seconds.items())
        return [
            ("tasks", f"{self.tasks:,}"),
            (
                "stream batches",
                f"{self.stream_batches:,}, of which {self.trained_batches:,} trained",
            ),
            ("SGD steps", f"{self.sgd_steps:,}"),
            ("refreshes", "at most " * self.fewer + f"{self.refreshes:,}"),
            ("evaluations", f"{self.evaluations:,}, {self.evaluated_images:,} images"),
            ("parameters", f"{self.parameters:,}"),
            ("replay memory", f"{self.memory_bytes / 2**20:.1f} MiB"),
            ("rule's factors", f"{self.rule_bytes / 2**20:.1f} MiB"),
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

    Args:
        config: what would be run.
        data_root: where data sets are looked for.
        batches: stream batches of the calibration; they are learned and thrown away.
    """
    benchmark = declared(config)
    dataset = benchmark.load(data_root)
    stream = build_stream(config, benchmark, dataset)
    learner = build_learner(config, benchmark, dataset, stream)
    due = [p for p in range(len(stream)) if evaluation_due(stream, p, config.eval_every)]
    images = sum(_held_out(stream, stream.task_at(p) + 1) for p in due)
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
        seconds_a_batch = _time_batches(learner, stream, batches)
        seconds_a_refresh = _time_refresh(learner, config.refresh.samples or at_most)
        seconds_an_image = _time_evaluation(learner, stream)
    row = learner.memory.nbytes / max(len(learner.memory), 1)
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
        memory_bytes=int(row * full),
        rule_bytes=_rule_bytes(learner),
        seconds={
            "learning": seconds_a_batch * stream.trained_batches,
            "refreshing": seconds_a_refresh * refreshes,
            "evaluating": seconds_an_image * images,
        },
    )


def _rule_bytes(learner: Learner | Floor) -> int:
    """What the factors of a layerwise rule take, once it has been refreshed."""
    if not isinstance(learner.rule, LayerwiseRule):
        return 0
    return sum(layer.bytes for layer in learner.rule.layers.values())


def _held_out(stream: Stream, tasks: int) -> int:
    return sum(len(task.validation) for task in stream.tasks[:tasks])


def _time_batches(learner: Learner | Floor, stream: Stream, batches: int) -> float:
    """Median seconds per batch, without refreshes."""
    times: list[float] = []
    while len(times) < batches and stream.position < len(stream):
        batch = next(stream)
        start = time.perf_counter()
        if learner.learn(batch).refreshed is None:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _time_refresh(learner: Learner | Floor, examples: int) -> float:
    """Seconds per refresh over so many examples, extrapolated from two smaller ones."""
    if isinstance(learner, Floor) or learner.rule is None:
        return 0.0
    seconds = []
    sizes = (len(learner.memory) // 2, len(learner.memory))
    whole = learner.refresh_samples
    for size in sizes:
        learner.refresh_samples = size
        start = time.perf_counter()
        learner.refresh()
        seconds.append(time.perf_counter() - start)
    learner.refresh_samples = whole
    an_example = max(seconds[1] - seconds[0], 0.0) / (sizes[1] - sizes[0])
    return seconds[1] + (examples - sizes[1]) * an_example


def _time_evaluation(learner: Learner | Floor, stream: Stream) -> float:
    """Seconds per image."""
    examples = stream.tasks[0].validation
    start = time.perf_counter()
    evaluate(learner.logits, [examples])
    return (time.perf_counter() - start) / len(examples)
