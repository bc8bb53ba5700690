"""Benchmarks as small declarations: data, tasks, network, transform and hyper-parameters.

The hyper-parameters of split-cifar100, split-tinyimagenet and online-clear are those the paper
selected. The others are plain defaults, not tuned by anybody, and ``from_paper`` says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxreplay.data.catalog import Status, find_dataset
from proxreplay.data.scenarios import ClassIncremental, DomainIncremental, Scenario
from proxreplay.data.transforms import Transform
from proxreplay.errors import InputError
from proxreplay.lazy import LazyModule

if TYPE_CHECKING:
    from torch import nn

    from proxreplay import models
    from proxreplay.data import Dataset
else:
    models = LazyModule("proxreplay.models")

CUSTOM = "custom"
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Defaults:
    """What a benchmark starts from where nothing else is said, such as one of your own data."""

    steps_per_batch: int = 3  # SGD steps per stream batch, S in the paper
    capacity: int = 500  # of the memory
    # hyper-parameters by replay method, alone and with LPR on top, under the keys of a
    # configuration; by default one learning rate for all methods
    settings: Settings = field(default_factory=lambda: {"er": {"lr": 0.05}})


@dataclass(frozen=True, kw_only=True)
class Benchmark(Defaults):
    """Everything that turns a name into a stream and a network."""

    name: str  # as users write it
    # name of the data set, as in proxreplay data fetch, or the data set itself
    data: "str | Dataset"
    scenario: Scenario  # how it becomes a stream
    # a fresh network, given num_classes (None for a growing head)
    network: "Callable[..., nn.Module]"
    transform: Transform  # from stored inputs to what the network sees
    from_paper: bool = False  # whether the settings are the paper's

    def load(self, data_root: str | Path | None = None) -> "Dataset":
        """The data set; see `proxreplay.data.roots.data_root` for where it is looked for."""
        return find_dataset(self.data)(data_root) if isinstance(self.data, str) else self.data

    def status(self, data_root: str | Path | None = None) -> Status:
        """Whether the data is there, where it was looked for and how to get it."""
        assert isinstance(self.data, str)  # only those with a name are asked
        return find_dataset(self.data).status(data_root)


# Strengths by `proxreplay sweep split-digits --method lpr-X --seed 5` over the paper's omega_0,
# except ER's, which is the demo's. With only some 320 steps, the average is a shorter one.
_DIGITS_SETTINGS: Settings = {
    "er": {"lr": 0.1, "lpr.omega_0": 1.0, "lpr.beta": 1.0},
    "er-ace": {"lr": 0.1, "lpr.omega_0": 0.04, "lpr.beta": 1.0},
    "der": {"lr": 0.1, "lpr.omega_0": 4.0, "lpr.beta": 1.0},
    "derpp": {"lr": 0.1, "lpr.omega_0": 1.0, "lpr.beta": 1.0},
    "ema": {"lr": 0.1, "lpr.omega_0": 0.25, "lpr.beta": 1.0, "averaging.momentum": 0.99},
    "lode": {"lr": 0.1, "lpr.omega_0": 0.25, "lpr.beta": 1.0, "loss.rho": 0.1},
    "agem": {"lr": 0.1},
    "aop": {"lr": 0.1},
}
_CIFAR100_SETTINGS: Settings = {
    "er": {"lr": 0.1, "lpr.omega_0": 4.0, "lpr.beta": 2.0},
    "der": {"lr": 0.05, "lpr.omega_0": 1.0, "lpr.beta": 1.0},
    "ema": {"lr": 0.05, "lpr.omega_0": 0.04, "lpr.beta": 1.0, "averaging.momentum": 0.999},
    "lode": {"lr": 0.1, "lpr.omega_0": 1.0, "lpr.beta": 2.0, "loss.rho": 0.1},
    "agem": {"lr": 0.05},
    "aop": {"lr": 0.05},
}
_TINYIMAGENET_SETTINGS: Settings = {
    "er": {"lr": 0.01, "lpr.omega_0": 0.25, "lpr.beta": 2.0},
    "der": {"lr": 0.01, "lpr.omega_0": 0.25, "lpr.beta": 2.0, "loss.logit_weight": 0.5},
    "ema": {"lr": 0.01, "lpr.omega_0": 0.25, "lpr.beta": 2.0, "averaging.momentum": 0.999},
    "lode": {"lr": 0.01, "lpr.omega_0": 0.25, "lpr.beta": 2.0, "loss.rho": 0.1},
    "agem": {"lr": 0.1},
    "aop": {"lr": 0.01},
}
_CLEAR_SETTINGS: Settings = {  # the paper has no LODE on CLEAR
    "er": {"lr": 0.01, "lpr.omega_0": 1.0, "lpr.beta": 1.0},
    "der": {"lr": 0.1, "lpr.omega_0": 0.25, "lpr.beta": 1.0, "loss.replay_weight": 0.5},
    "ema": {"lr": 0.05, "lpr.omega_0": 0.25, "lpr.beta": 1.0, "averaging.momentum": 0.999},
    "agem": {"lr": 0.01},
    "aop": {"lr": 0.05},
}
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CIFAR10_MEAN, _CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR100_MEAN, _CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def _grey(name: str, data: str, mean: float, std: float) -> Benchmark:
    return Benchmark(
        name=name,
        data=data,
        scenario=ClassIncremental(tasks=5),
        network=lambda num_classes=None: models.mlp(28 * 28, num_classes),
        transform=Transform(scale=255.0, mean=(mean,), std=(std,)),
    )


_BENCHMARKS = (
    Benchmark(
        name="split-digits",
        data="digits",
        scenario=ClassIncremental(tasks=5),
        network=lambda num_classes=None: models.mlp(64, num_classes),
        transform=Transform(scale=16.0, mean=(0.305,), std=(0.376,)),
        capacity=50,
        settings=_DIGITS_SETTINGS,
    ),
    _grey("split-mnist", "mnist", 0.1307, 0.3081),
    _grey("split-fashion", "fashion-mnist", 0.2860, 0.3530),
    Benchmark(
        name="split-cifar10",
        data="cifar10",
        scenario=ClassIncremental(tasks=5),
        network=lambda num_classes=None: models.slim_resnet18(num_classes),
        transform=Transform(255.0, _CIFAR10_MEAN, _CIFAR10_STD, crop_padding=4, flip=True),
        settings=_CIFAR100_SETTINGS,
    ),
    Benchmark(
        name="split-cifar100",
        data="cifar100",
        scenario=ClassIncremental(tasks=20),
        network=lambda num_classes=None: models.slim_resnet18(num_classes),
        transform=Transform(255.0, _CIFAR100_MEAN, _CIFAR100_STD, crop_padding=4, flip=True),
        capacity=2000,
        settings=_CIFAR100_SETTINGS,
        from_paper=True,
    ),
    Benchmark(
        name="split-tinyimagenet",
        data="tinyimagenet",
        scenario=ClassIncremental(tasks=20),
        network=lambda num_classes=None: models.slim_resnet18(num_classes, image_size=64),
        transform=Transform(  # the paper's code normalises with CIFAR-10's constants
            255.0, _CIFAR10_MEAN, std=(0.2023, 0.1994, 0.2010), crop_padding=8, flip=True
        ),
        steps_per_batch=9,
        capacity=4000,
        settings=_TINYIMAGENET_SETTINGS,
        from_paper=True,
    ),
    Benchmark(
        name="online-clear",
        data="clear10",
        scenario=DomainIncremental(),
        network=lambda num_classes=None: models.resnet18(num_classes),
        transform=Transform(255.0, _IMAGENET_MEAN, _IMAGENET_STD, flip=True, crop_size=224),
        steps_per_batch=10,
        capacity=2000,
        settings=_CLEAR_SETTINGS,
        from_paper=True,
    ),
    Benchmark(
        name="domain-pacs",
        data="pacs",
        scenario=DomainIncremental(order=("photo", "art_painting", "cartoon", "sketch")),
        network=lambda num_classes=None: models.slim_resnet18(num_classes, image_size=64),
        transform=Transform(255.0, _IMAGENET_MEAN, _IMAGENET_STD, crop_padding=8, flip=True),
    ),
)
BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for b in _BENCHMARKS}


def find_benchmark(name: str) -> Benchmark:
    """The benchmark with this name; for data of your own see `custom.custom`."""
    if name not in BENCHMARKS:
        raise InputError(
            f"unknown benchmark '{name}'; there are {', '.join(BENCHMARKS)}, and 'custom' for "
            "data of your own."
        )
    return BENCHMARKS[name]
