"""What rules with statistics from the training step cost, against plain ER, in one run."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.data import stretch
from benchmarks.network import CIFAR, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR, KroneckerLPR, Learner
from proxreplay.models import mlp
from proxreplay.proximal import GradientRule
from proxreplay.replay import ClassBalancedMemory

BATCHES = 20  # as many as two refreshes of LPR serve, or five rebuilds of KroneckerLPR
Make = Callable[[nn.Module], GradientRule | None]
RULES: dict[str, Make] = {
    "er": lambda model: None,
    "lpr without numbers": lambda model: LPR(model),
    "lpr, refresh": lambda model: LPR(model, 4.0, 2.0),
    "lpr, step": lambda model: LPR(model, 4.0, 2.0, statistics="step"),
    "klpr": lambda model: KroneckerLPR(model),
}


def learners(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, transform: Callable[..., Tensor] | None
) -> dict[str, Learner]:
    """One learner per rule, with a filled memory."""
    found = {}
    for name, rule in RULES.items():
        torch.manual_seed(0)
        model = make()
        memory = ClassBalancedMemory(500)
        learner = Learner(model, memory, rule(model), lr=0.01, averaging=None, transform=transform)
        learner.remember(x[:500], y[:500])
        found[name] = learner
    return found


def timed(title: str, found: dict[str, Learner], x: Tensor, y: Tensor, limits: list[float]) -> list:
    """The time of some stream batches, in that of ER."""
    batches = list(zip(x[500:].split(10), y[500:].split(10), strict=True))

    def all_batches(learner: Learner) -> None:
        for inputs, labels in batches:
            learner.learn(inputs, labels)

    functions = {name: (lambda own=own: all_batches(own)) for name, own in found.items()}
    times = interleaved(functions, rounds=3)
    targets = dict(zip(("lpr, step", "klpr"), limits, strict=False))
    return [
        Claim(f"{name} / er, {title}", times.ratio(name, "er"), "x", targets.get(name))
        for name in found
        if name != "er"
    ]


def run() -> list[Claim]:
    x, y, source = stretch(500 + 10 * BATCHES)
    claims = timed(f"slim ResNet18 ({source})", learners(network, x, y, CIFAR), x, y, [1.2, 1.4])
    flat = torch.randn(500 + 10 * BATCHES, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(flat)) % 10
    small = learners(lambda: mlp(784, 10), flat, labels, None)
    return claims + timed("MLP 784-256-256-10", small, flat, labels, [1.3])


if __name__ == "__main__":
    main("Statistics from steps", run)
