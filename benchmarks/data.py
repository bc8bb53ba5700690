"""A stretch of a stream: CIFAR-100 where ``PROXREPLAY_DATA`` has it, else noise of that shape."""

import os

import torch
from torch import Tensor

from proxreplay.errors import ProxreplayError
from proxreplay.experiments.benchmarks import find_benchmark


def stretch(n: int) -> tuple[Tensor, Tensor, str]:
    """``n`` stored images and labels of the first tasks, and where they are from."""
    if os.environ.get("PROXREPLAY_DATA"):
        try:
            train = find_benchmark("split-cifar100").load().train
        except ProxreplayError as error:
            print(f"  no CIFAR-100 ({error}); noise instead")
        else:
            order = torch.argsort(train.labels, stable=True)[:n]  # few classes, as in a stream
            mixed = order[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
            return train.inputs[mixed], train.labels[mixed], "CIFAR-100"
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, 32, 32), generator=rng, dtype=torch.uint8)
    return x, torch.randint(20, (n,), generator=rng), "noise"
