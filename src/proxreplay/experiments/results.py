"""Records on disk: what a run writes, and how it is read again."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proxreplay.evaluation import (
    Trajectory,
    average_anytime_accuracy,
    final_accuracy,
    worst_case_accuracy,
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What a finished run amounts to.

    Args:
        acc: mean test accuracy over tasks at the end.
        aaa: average anytime accuracy on validation examples.
        wc_acc: worst-case accuracy on validation examples.
        test_accuracy: at the end, one a task.
        eval_every: stream batches between evaluations; WC-Acc is optimistic if above 1.
    """

    acc: float
    aaa: float
    wc_acc: float
    test_accuracy: list[float]
    eval_every: int


def trajectory(records: Iterable[Record]) -> Trajectory:
    """Validation accuracies over time."""
    evaluations = [r for r in records if r["kind"] == "evaluation" and r["split"] == "validation"]
    width = max(len(r["accuracy"]) for r in evaluations)
    accuracy = np.full((len(evaluations), width), np.nan)
    for row, record in zip(accuracy, evaluations, strict=True):
        row[: len(record["accuracy"])] = record["accuracy"]
    return Trajectory(
        np.array([r["position"] for r in evaluations]),
        np.array([r["task"] for r in evaluations]),
        accuracy,
    )


def summarise(records: list[Record], eval_every: int) -> Result:
    """The paper's measures of one run."""
    path = trajectory(records)
    test = next(r for r in records if r["kind"] == "evaluation" and r["split"] == "test")
    return Result(
        acc=final_accuracy(np.array(test["accuracy"])),
        aaa=average_anytime_accuracy(path),
        wc_acc=worst_case_accuracy(path),
        test_accuracy=test["accuracy"],
        eval_every=eval_every,
    )


def write_text(path: Path, text: str) -> None:
    """Write a whole file or, if interrupted, leave the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_result(path: Path, result: Result) -> None:
    """``result.json``."""
    write_text(path, json.dumps(asdict(result), indent=2) + "\n")


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a ``records.jsonl``."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
