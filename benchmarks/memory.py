"""Adding and sampling ten images: as a share of a training step, and at a million items.

python -m benchmarks.memory
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.batch import Batch
from proxreplay.models import slim_resnet18
from proxreplay.replay.memory import ClassBalancedMemory, Memory, ReservoirMemory, RingMemory


def quick_seconds(function: Callable[[], object], repeats: int) -> float:
    """The lower decile over repeats, after a few to warm up; robust on a busy machine."""
    times = []
    for i in range(repeats + 5):
        start = time.perf_counter()
        function()
        if i >= 5:
            times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=10)[0]


def fill(memory: Memory, items: int, shape: tuple[int, ...], generator: torch.Generator) -> None:
    """Put items of 100 classes into a memory, in large batches."""
    for start in range(0, items, 5000):
        n = min(5000, items - start)
        inputs = torch.zeros(n, *shape, dtype=torch.uint8)
        memory.add(Batch(inputs, torch.randint(100, (n,), generator=generator)), generator)


def training_step(generator: torch.Generator) -> float:
    """Seconds of one step of a slim ResNet18 on 20 images."""
    model = slim_resnet18(100).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(20, 3, 32, 32, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(100, (20,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return quick_seconds(step, 20)


def ten(shape: tuple[int, ...], generator: torch.Generator) -> Callable[[], Batch]:
    """Batches of ten to add, made beforehand."""
    batches = [
        Batch(torch.zeros(10, *shape, dtype=torch.uint8), torch.randint(100, (10,)))
        for _ in range(50)
    ]
    turn = iter(range(10**9))
    return lambda: batches[next(turn) % 50]


def naive_sample(memory: Memory, generator: torch.Generator) -> Tensor:
    """The obvious way: a permutation of everything."""
    slots = torch.randperm(len(memory), generator=generator)[:10]
    return memory._storage.tensors["inputs"][slots]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    step = training_step(generator)
    print(f"a step of slim ResNet18 on 20 images: {1e3 * step:.1f} ms")
    print("memory               items        add 10     sample 10   of a step   randperm")
    for kind in (ClassBalancedMemory, ReservoirMemory, RingMemory):
        for items, shape in ((2_000, (3, 32, 32)), (1_000_000, (3, 8, 8))):
            memory = kind(items)
            fill(memory, items, shape, generator)
            batch = ten(shape, generator)
            add = quick_seconds(lambda m=memory, b=batch: m.add(b(), generator), 1000)  # type: ignore[misc]
            sample = quick_seconds(lambda m=memory: m.sample(10, generator), 1000)  # type: ignore[misc]
            naive = quick_seconds(lambda m=memory: naive_sample(m, generator), 20)  # type: ignore[misc]
            print(
                f"{kind.__name__:<20} {len(memory):>9,} {1e6 * add:8.0f} us {1e6 * sample:8.0f} us "
                f"{100 * (add + sample) / step:9.2f} % {1e6 * naive:8.0f} us"
            )


if __name__ == "__main__":
    main()
