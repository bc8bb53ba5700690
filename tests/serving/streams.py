"""Small learners and streams for the tests of serving."""

from collections.abc import Iterator

import torch
from torch import Tensor

from proxreplay import LPR, AveragingOptions, ClassBalancedMemory, Learner
from proxreplay.models import mlp, small_cnn
from proxreplay.seeding import seeded


def make(kind: str = "mlp", seed: int = 0) -> Learner:
    """A fresh learner; always the same one."""
    with seeded(seed, "model"):
        model = mlp(8, hidden=(16,)) if kind == "mlp" else small_cnn(1, widths=(4, 8))
    return Learner(
        model,
        ClassBalancedMemory(20),
        LPR(model, omega_0=1.0),
        averaging=AveragingOptions(momentum=0.9),
        steps_per_batch=2,
        replay_batch=4,
        refresh_every=3,
        refresh_samples=8,
        seed=seed,
    )


def batches(count: int, seed: int = 0, n: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of two classes at a time, which drift."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        labels = torch.randint(0, 2, (n,), generator=rng) + 2 * (i * 3 // max(1, count))
        inputs = torch.randn(n, 8, generator=rng) + labels[:, None] * torch.linspace(-1, 1, 8)
        found.append((inputs, labels))
    return found


def poison(n: int = 4) -> tuple[Tensor, Tensor]:
    """A batch with which a step is not finite, though every number of it is."""
    return torch.full((n, 8), 3e38), torch.zeros(n, dtype=torch.int64)


def names(labels: Tensor) -> Iterator[str]:
    return (f"class {label}" for label in labels.tolist())
