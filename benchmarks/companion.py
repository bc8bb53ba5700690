"""What a companion adds to the time of ER, and what all parts of `anytime` take together.

With ``--threads 1 --cpu`` on a busy machine.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.strength import BATCHES, MEMORY, NETWORKS
from benchmarks.timing import Claim, interleaved, main
from proxreplay import (
    AveragingOptions,
    ClassBalancedMemory,
    CompanionOptions,
    KroneckerLPR,
    Learner,
)


def run() -> list[Claim]:
    claims = []
    for name in ("slim ResNet18", "MLP 784-256-256-10"):
        make, shape = NETWORKS[name]
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(MEMORY + 10 * BATCHES, *shape, generator=rng)
        y = torch.randint(0, 10, (len(x),), generator=rng)

        def learner(
            companion: CompanionOptions | None,
            rule: Callable[[nn.Module], KroneckerLPR] | None = None,
            averaging: AveragingOptions | None = None,
            make: Callable[[], nn.Module] = make,
            x: Tensor = x,
            y: Tensor = y,
        ) -> Learner:
            torch.manual_seed(0)
            model = make()
            made = Learner(
                model,
                ClassBalancedMemory(MEMORY),
                None if rule is None else rule(model),
                averaging=averaging,
                companion=companion,
                lr=0.01,
            )
            made.remember(x[:MEMORY], y[:MEMORY])
            return made

        def cycle(one: Learner, x: Tensor = x, y: Tensor = y) -> None:
            for inputs, labels in zip(x[MEMORY:].split(10), y[MEMORY:].split(10), strict=True):
                one.learn(inputs, labels)

        learners = {
            "alone": learner(None),
            "with": learner(CompanionOptions()),
            "anytime": learner(CompanionOptions(), KroneckerLPR, AveragingOptions()),
        }
        times = interleaved(
            {key: lambda one=one: cycle(one) for key, one in learners.items()},  # type: ignore[misc]
            rounds=3,
        )
        claims += [
            Claim(f"{name}: ER with a companion / ER", times.ratio("with", "alone"), "x", 1.05),
            Claim(f"{name}: anytime / ER", times.ratio("anytime", "alone"), "x", 1.5),
            Claim(f"{name}: ms per batch of ER", 1000 * times.median("alone") / BATCHES, ""),
        ]
    return claims


if __name__ == "__main__":
    main("Companion", run)
