"""Preconditioning all gradients, exactly and spectrally, against the step that it belongs to.

The factors are made after some training, as the number of directions that matter grows with it.
"""

import torch
from torch.nn import functional as F

from benchmarks.data import stretch
from benchmarks.network import CIFAR, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR
from proxreplay.proximal.shrinkage.forms import SpectralShrinkage


def run() -> list[Claim]:
    model = network()
    images, labels, source = stretch(1000)
    inputs = CIFAR(images, None).contiguous(memory_format=torch.channels_last)
    x, y = inputs[:20], labels[:20]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = LPR(model, omega_0=4.0, beta=2.0, tolerance=0)
    spectral = LPR(model, omega_0=4.0, beta=2.0, tolerance=0.02)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    model.train()
    for part, targets in zip(inputs.split(20), labels.split(20), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(part), targets).backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-6  # the same network from here on
    refreshes = interleaved(
        {
            "exact": lambda: exact.refresh(inputs[:200]),
            "spectral": lambda: spectral.refresh(inputs[:200]),
        },
        rounds=1,
    )
    times = interleaved(
        {"step": step, "exact": exact.precondition_, "spectral": spectral.precondition_}, rounds=30
    )
    factors = [spectral.shrinkage(n) for n, one in spectral.layers.items() if one.d == 1440]
    ranks = [one.f.shape[1] for one in factors if isinstance(one, SpectralShrinkage)]
    more = refreshes.median("spectral") - refreshes.median("exact")
    return [
        Claim(
            f"exact preconditioning / training step of 10 + 10 ({source})",
            100 * times.ratio("exact", "step"),
            "%",
            15.0,
        ),
        Claim(
            "spectral preconditioning, tolerance 0.02 / training step",
            100 * times.ratio("spectral", "step"),
            "%",
            5.0,
        ),
        Claim("directions kept of 1,440, mean over layers", sum(ranks) / max(1, len(ranks)), ""),
        Claim("seconds that finding them adds to a refresh", more, ""),
        Claim("milliseconds of a training step", 1e3 * times.median("step"), ""),
    ]


if __name__ == "__main__":
    main("Preconditioning", run)
