"""``Learner.learn`` with ER against a bare loop that makes the same steps, written by hand."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.data import stretch
from benchmarks.network import CIFAR, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import Learner
from proxreplay.replay import ClassBalancedMemory

MEMORY, BATCHES, STEPS = 2000, 4, 3


def filled_learner(x: Tensor, y: Tensor) -> Learner:
    """A learner whose memory is full."""
    learner = Learner(
        network(), ClassBalancedMemory(MEMORY), lr=0.01, steps_per_batch=STEPS, transform=CIFAR
    )
    learner.remember(x[:MEMORY], y[:MEMORY])
    return learner


def bare_loop(x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], float]:
    """One stream batch: three steps on it and ten remembered images, then a reservoir update."""
    model, rng = network().train(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels, seen = x[:MEMORY].clone(), y[:MEMORY].clone(), MEMORY

    def learn(incoming: Tensor, targets: Tensor) -> float:
        nonlocal seen
        losses = []
        for _ in range(STEPS):
            drawn = torch.randint(MEMORY, (10,), generator=rng)
            both = torch.cat([CIFAR(incoming, rng), CIFAR(images[drawn], rng)])
            both = both.contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(both), torch.cat([targets, labels[drawn]]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        for image, label in zip(incoming, targets, strict=True):
            place = int(torch.randint(seen + 1, (), generator=rng))
            seen += 1
            if place < MEMORY:
                images[place], labels[place] = image, label
        return float(torch.stack(losses).mean())

    return learn


def run() -> list[Claim]:
    x, y, source = stretch(MEMORY + 10 * BATCHES)
    learner, bare = filled_learner(x, y), bare_loop(x, y)
    batches = list(zip(x[MEMORY:].split(10), y[MEMORY:].split(10), strict=True))

    def all_batches(learn: Callable[[Tensor, Tensor], float]) -> None:
        for inputs, labels in batches:
            learn(inputs, labels)

    times = interleaved(
        {"bare": lambda: all_batches(bare), "learner": lambda: all_batches(learner.learn)},
        rounds=4,
    )
    each = 1e3 / BATCHES / STEPS
    return [
        Claim(
            f"Learner.learn / bare loop, ER ({source})", times.ratio("learner", "bare"), "x", 1.05
        ),
        Claim("milliseconds of a step of the bare loop", each * times.median("bare"), ""),
    ]


if __name__ == "__main__":
    main("Learner", run)
