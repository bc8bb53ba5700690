"""Projection and replay together on split-digits: mean and standard error over seeds.

    python examples/projection_digits.py --seeds 5

Five tasks of two digits each, every example once, three SGD steps per batch of ten, memory of 50.
The methods without replay are on the command line: docs/rules.md, "On split-digits".
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from proxreplay import LPR, ClassBalancedMemory, Learner, er
from proxreplay.data import ClassIncremental, Transform, digits
from proxreplay.models import mlp
from proxreplay.proximal import AOP, GPM, OWM, SGP, AdaptiveAlpha, GradientRule, StreamProgress

STEPS = 3
RULES: dict[str, Callable[[nn.Module, int], GradientRule | None]] = {
    "er": lambda model, steps: None,
    "er + owm": lambda model, steps: OWM(model, 1e-3),
    "er + owm, alpha 1": lambda model, steps: OWM(model, 1.0),
    "er + aop": lambda model, steps: AOP(model, AdaptiveAlpha(StreamProgress(steps))),
    "er + gpm": lambda model, steps: GPM(model, 0.97),
    "er + gpm, all directions": lambda model, steps: GPM(model, 1.0),
    "er + sgp": lambda model, steps: SGP(model, 0.97),
    "lpr-er": lambda model, steps: LPR(model, omega_0=1.0, beta=1.0),
}


def run(method: str, seed: int) -> tuple[float, float]:
    """Accuracy on all test digits, and on those of the last task, after one pass."""
    stream = ClassIncremental(tasks=5).stream(digits(), seed)
    torch.manual_seed(seed)
    model = mlp(64)
    learner = Learner(
        model,
        ClassBalancedMemory(50),
        RULES[method](model, STEPS * stream.trained_batches),
        loss=er,
        averaging=None,
        lr=0.1,
        steps_per_batch=STEPS,
        transform=Transform(scale=16, mean=(0.305,), std=(0.376,)),
        seed=seed,
    )
    learner.learn_stream(stream)
    tests = [task.test for task in stream.tasks]
    accuracy = [learner.evaluate(test.inputs, test.labels) for test in tests]
    return sum(accuracy) / len(accuracy), accuracy[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=RULES, default=list(RULES))
    options = parser.parse_args()
    print("| method | accuracy | of the last task |\n|---|---|---|")
    for method in options.methods:
        values = torch.tensor([run(method, seed) for seed in range(options.seeds)])
        mean, error = values.mean(dim=0), values.std(dim=0) / len(values) ** 0.5
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True)]
        print(f"| {method} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
