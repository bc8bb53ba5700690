"""Benchmarks as small declarations: data, stream, network, and the settings that go with them."""

from dataclasses import dataclass, field

from torch import nn

from proxreplay.data import Dataset, Stream, Transform, class_incremental, digits
from proxreplay.errors import InputError
from proxreplay.models import mlp


@dataclass(frozen=True)
class Benchmark:
    """Split-digits, for now."""

    name: str = "split-digits"
    tasks: int = 5
    memory: int = 50
    steps_per_batch: int = 3
    lr: float = 0.1
    omega_0: float = 1.0
    beta: float = 1.0
    transform: Transform = field(default=Transform(scale=16.0, mean=(0.305,), std=(0.376,)))

    def load(self) -> Dataset:
        """The data."""
        return digits()

    def stream(self, dataset: Dataset, seed: int, batch_size: int) -> Stream:
        """The stream that a seed gives."""
        return class_incremental(dataset, self.tasks, seed, batch_size=batch_size)

    def network(self) -> nn.Module:
        """A fresh network with a growing head."""
        return mlp(64)


def find_benchmark(name: str) -> Benchmark:
    """The benchmark with this name."""
    if name != "split-digits":
        raise InputError(f"unknown benchmark '{name}'; there is 'split-digits'.")
    return Benchmark()
