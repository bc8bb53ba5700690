"""One run: a method learns one seed of a benchmark, and everything that happens is recorded."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from proxreplay.batch import Batch
from proxreplay.data import Dataset, Stream
from proxreplay.evaluation import evaluate
from proxreplay.experiments.benchmarks import find_benchmark
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.methods import build_learner
from proxreplay.experiments.results import Record, Result, summarise, write_result, write_text
from proxreplay.replay import Learner
from proxreplay.seeding import seeded

OnBatch = Callable[[Batch, int], None]


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over: how it was set up, what it recorded, what it amounts to."""

    config: RunConfig
    records: list[Record]
    result: Result


def run(
    config: RunConfig,
    folder: Path,
    *,
    dataset: Dataset | None = None,
    on_batch: OnBatch = lambda batch, total: None,
) -> FinishedRun:
    """Run one configuration and write ``config.yaml``, ``records.jsonl`` and ``result.json``.

    Args:
        config: what to run.
        folder: where the records go.
        dataset: the benchmark's data, if already loaded.
        on_batch: called after every stream batch with the batch and the length of the stream.
    """
    benchmark = find_benchmark(config.benchmark)
    stream = benchmark.stream(dataset or benchmark.load(), config.seed, config.batch_size)
    with seeded(config.seed, "model"):
        network = benchmark.network()
    learner = build_learner(config, network, benchmark.transform)

    records: list[Record] = []
    for batch in stream:
        records += _learn(learner, batch)
        if _evaluation_due(stream, batch, config.eval_every):
            records.append(_evaluation(learner, stream, batch))
        on_batch(batch, len(stream))
    test = evaluate(learner.logits, [task.test for task in stream.tasks])
    records.append(
        {"kind": "evaluation", "split": "test", "accuracy": test.accuracy, "loss": test.loss}
    )

    result = summarise(records, config.eval_every)
    write_text(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
    write_text(folder / "records.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    write_result(folder / "result.json", result)
    return FinishedRun(config, records, result)


def _learn(learner: Learner, batch: Batch) -> list[Record]:
    if not batch.train:
        learner.remember(batch.inputs, batch.labels)
        return []
    loss = learner.learn(batch.inputs, batch.labels)
    return [{"kind": "train", "position": batch.position, "task": batch.task, "loss": loss}]


def _evaluation_due(stream: Stream, batch: Batch, every: int) -> bool:
    """Every so many batches, and always around a task switch, where the dips are."""
    assert batch.position is not None
    nearby = range(max(batch.position - 3, 0), min(batch.position + 2, len(stream)))
    around_switch = len({stream.task_at(p) for p in nearby}) > 1
    last = batch.position == len(stream) - 1
    return (batch.position + 1) % every == 0 or around_switch or last


def _evaluation(learner: Learner, stream: Stream, batch: Batch) -> Record:
    assert batch.task is not None
    seen = [task.validation for task in stream.tasks[: batch.task + 1]]
    outcome = evaluate(learner.logits, seen)
    return {
        "kind": "evaluation",
        "split": "validation",
        "position": batch.position,
        "task": batch.task,
        "accuracy": outcome.accuracy,
        "loss": outcome.loss,
    }
