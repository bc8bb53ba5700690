"""Projection against replay on split-digits: final accuracy, mean and standard error over seeds.

    python examples/projection_digits.py --seeds 5

Five tasks of two digits each, every example once, three SGD steps a batch of ten, memory of 50.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from proxreplay import LPR, ClassBalancedMemory, Learner, er, finetune
from proxreplay.data import Transform, class_incremental, digits
from proxreplay.models import mlp
from proxreplay.proximal import (
    AGEM,
    AOP,
    GPM,
    OWM,
    SGP,
    AdaptiveAlpha,
    GradientRule,
    StreamProgress,
)

STEPS = 3
Make = Callable[[nn.Module, int], GradientRule | None]

METHODS: dict[str, tuple[object, Make]] = {
    "finetune": (finetune, lambda model, steps: None),
    "agem": (finetune, lambda model, steps: AGEM(model, samples=50)),
    "owm": (finetune, lambda model, steps: OWM(model, 1e-3)),
    "aop": (finetune, lambda model, steps: AOP(model, AdaptiveAlpha(StreamProgress(steps)))),
    "gpm": (finetune, lambda model, steps: GPM(model, 0.97)),
    "gpm, all directions": (finetune, lambda model, steps: GPM(model, 1.0)),
    "sgp": (finetune, lambda model, steps: SGP(model, 0.97)),
    "er": (er, lambda model, steps: None),
    "er-agem": (er, lambda model, steps: AGEM.joint(model)),
    "er + owm": (er, lambda model, steps: OWM(model, 1e-3)),
    "er + aop": (er, lambda model, steps: AOP(model, AdaptiveAlpha(StreamProgress(steps)))),
    "er + gpm": (er, lambda model, steps: GPM(model, 0.97)),
    "er + gpm, all directions": (er, lambda model, steps: GPM(model, 1.0)),
    "er + sgp": (er, lambda model, steps: SGP(model, 0.97)),
    "lpr-er": (er, lambda model, steps: LPR(model, omega_0=1.0, beta=1.0)),
}


def run(method: str, seed: int) -> tuple[float, float]:
    """Accuracy on all test digits, and on those of the last task, after one pass."""
    stream = class_incremental(digits(), tasks=5, seed=seed)
    torch.manual_seed(seed)
    model = mlp(64)
    loss, make = METHODS[method]
    learner = Learner(
        model,
        ClassBalancedMemory(50),
        make(model, STEPS * len(stream)),
        loss=loss,
        lr=0.1,
        steps_per_batch=STEPS,
        transform=Transform(scale=16, mean=(0.305,), std=(0.376,)),
        seed=seed,
    )
    learner.learn_stream(stream)
    tests = [task.test for task in stream.tasks]
    right = [learner.evaluate(test.inputs, test.labels) * len(test) for test in tests]
    return sum(right) / sum(map(len, tests)), right[-1] / len(tests[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    print("| method | accuracy | of the last task |\n|---|---|---|")
    for method in options.methods:
        values = torch.tensor([run(method, seed) for seed in range(options.seeds)])
        mean, error = values.mean(dim=0), values.std(dim=0) / len(values) ** 0.5
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True)]
        print(f"| {method} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
