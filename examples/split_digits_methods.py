"""Every replay method with and without LPR on split-digits: ten classes, two at a time.

    python examples/split_digits_methods.py            # five seeds, 60 runs
    python examples/split_digits_methods.py --tune     # lr and omega_0 from the paper's grids

A network with 64-256-256-10 units sees every digit once, in batches of ten, takes three steps on
each batch and may remember 50 digits.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from proxreplay import (
    EMA,
    LPR,
    ClassBalancedMemory,
    DerppSnapshot,
    Learner,
    derpp,
    er,
    er_ace,
    lode,
)
from proxreplay.data import Dataset, Stream, Transform, class_incremental, digits
from proxreplay.evaluation.evaluate import evaluate
from proxreplay.evaluation.metrics import (
    Trajectory,
    average_anytime_accuracy,
    final_accuracy,
    worst_case_accuracy,
)
from proxreplay.models import mlp
from proxreplay.replay import Loss
from proxreplay.seeding import seeded

SEEDS = range(5)
TUNING_SEEDS = range(5, 8)
LRS = (0.01, 0.05, 0.1)
OMEGAS = (0.04, 0.25, 1.0, 4.0, 100.0)  # the paper's grids; beta has no effect on linear layers
TRANSFORM = Transform(scale=16.0, mean=(0.305,), std=(0.376,))


@dataclass(frozen=True)
class Method:
    """A recipe: loss, head and averaging; lr and omega_0 are those ``--tune`` chose for ER."""

    loss: Loss
    lr: float
    omega_0: float
    fixed_head: bool = False
    momentum: float | None = None


METHODS = {
    "ER": Method(er, lr=0.1, omega_0=1.0),
    "ER-ACE": Method(er_ace, lr=0.1, omega_0=1.0),
    "LODE": Method(lode, lr=0.1, omega_0=1.0),
    "DER": Method(DerppSnapshot(), lr=0.1, omega_0=1.0, fixed_head=True),
    "DER++": Method(derpp, lr=0.1, omega_0=1.0, fixed_head=True),
    "EMA": Method(er, lr=0.1, omega_0=1.0, momentum=0.99),
}


def run(data: Dataset, method: Method, lpr: bool, seed: int) -> tuple[float, float, float]:
    """One seed of one method: Acc on test, AAA and WC-Acc on validation digits."""
    stream = class_incremental(data, tasks=5, seed=seed)
    with seeded(seed, "model"):
        model = mlp(64, num_classes=10 if method.fixed_head else None)
    learner = Learner(
        model,
        ClassBalancedMemory(50),
        LPR(model, method.omega_0) if lpr else None,
        loss=method.loss,
        averaging=None if method.momentum is None else EMA(model, method.momentum),
        lr=method.lr,
        transform=TRANSFORM,
        seed=seed,
    )
    trajectory = watch(learner.learn, learner.logits, stream)
    test = evaluate(learner.logits, [task.test for task in stream.tasks]).accuracy
    return (
        final_accuracy(np.array(test)),
        average_anytime_accuracy(trajectory),
        worst_case_accuracy(trajectory),
    )


def watch(
    learn: Callable[..., float], logits: Callable[[Tensor], Tensor], stream: Stream
) -> Trajectory:
    """Learn the stream and evaluate after every batch."""
    tasks, rows = [], []
    for batch in stream:
        learn(batch)
        row = np.full(len(stream.tasks), np.nan)
        seen = [task.validation for task in stream.tasks[: batch.task + 1]]
        row[: len(seen)] = evaluate(logits, seen).accuracy
        tasks.append(batch.task)
        rows.append(row)
    return Trajectory(np.arange(len(rows)), np.array(tasks), np.array(rows))


def table(data: Dataset) -> None:
    """Mean and standard error over the seeds, and the paired gain of LPR."""
    print(
        "| method | Acc | AAA | WC-Acc | gain: Acc | AAA | WC-Acc |\n|---|---|---|---|---|---|---|"
    )
    for name, method in METHODS.items():
        plain, lpr = (np.array([run(data, method, on, s) for s in SEEDS]) for on in (False, True))
        print(f"| {name} | {cells(plain)} | | | |")
        print(f"| LPR ({name}) | {cells(lpr)} | {cells(lpr - plain, '+')} |", flush=True)


def cells(values: np.ndarray, sign: str = "") -> str:
    errors = values.std(axis=0, ddof=1) / len(values) ** 0.5
    pairs = zip(values.mean(axis=0) * 100, errors * 100, strict=True)
    return " | ".join(f"{mean:{sign}.1f} ± {error:.1f}" for mean, error in pairs)


def tune(data: Dataset) -> None:
    """The best lr without LPR, then the best omega_0 with it, by AAA on other seeds."""
    for name, method in METHODS.items():
        by_lr = {lr: score(data, replace(method, lr=lr), lpr=False) for lr in LRS}
        lr = max(by_lr, key=by_lr.__getitem__)
        tuned = replace(method, lr=lr)
        by_omega = {w: score(data, replace(tuned, omega_0=w), lpr=True) for w in OMEGAS}
        omega_0 = max(by_omega, key=by_omega.__getitem__)
        print(f"{name}: lr={lr}, omega_0={omega_0}", flush=True)
        for key, value in itertools.chain(by_lr.items(), by_omega.items()):
            print(f"    {key}: {value:.3f}", flush=True)


def score(data: Dataset, method: Method, *, lpr: bool) -> float:
    return statistics.mean(run(data, method, lpr, seed)[1] for seed in TUNING_SEEDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="choose lr and omega_0 from the grids")
    (tune if parser.parse_args().tune else table)(digits())
