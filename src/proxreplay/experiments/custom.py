"""A benchmark from anybody's own data: what is not said is read off the data."""

from pathlib import Path

import torch
from torch import Tensor, nn

from proxreplay.data import Dataset, Transform
from proxreplay.data.arrays import from_npz
from proxreplay.data.scenarios import ClassIncremental, DomainIncremental, Scenario
from proxreplay.data.trees import image_tree
from proxreplay.errors import InputError
from proxreplay.experiments.benchmarks import CUSTOM, CUSTOM_DEFAULTS, Benchmark
from proxreplay.models import load_network, mlp, slim_resnet18, small_cnn

SMALLEST_FOR_RESNET = 25
SAMPLES_FOR_STATISTICS = 1000


def custom(
    data: str | Path,
    *,
    tasks: int | None = None,
    scenario: Scenario | None = None,
    network: str | None = None,
    image_size: int | None = None,
    augment: bool = True,
    steps_per_batch: int = CUSTOM_DEFAULTS.steps_per_batch,
    capacity: int = CUSTOM_DEFAULTS.capacity,
) -> Benchmark:
    """A benchmark from a folder or zip of images, or from an ``.npz`` file.

    Args:
        data: see `image_tree` and `from_npz`.
        tasks: class-incremental tasks; None for one task a domain.
        scenario: anything else, instead of ``tasks``.
        network: import path of a network, see `load_network`; None for `slim_resnet18` on images
            of 25 pixels and more, `small_cnn` on smaller ones, and `mlp` on everything else.
        image_size: side of the stored images; None to keep a common size.
        augment: crop (with a padding of an eighth) and mirror images at random.
        steps_per_batch: SGD steps per stream batch, S in the paper.
        capacity: of the memory.
    """
    path = Path(data)
    dataset = from_npz(path) if path.suffix == ".npz" else image_tree(path, image_size=image_size)
    return Benchmark(
        name=CUSTOM,
        data=str(path),
        loader=lambda data_root: dataset,
        scenario=scenario or _default_scenario(dataset, tasks),
        builder=lambda num_classes: _network(network, dataset, num_classes),
        transform=fitting_transform(dataset.train.inputs, augment=augment),
        steps_per_batch=steps_per_batch,
        capacity=capacity,
        settings=CUSTOM_DEFAULTS.settings,
    )


def _default_scenario(dataset: Dataset, tasks: int | None) -> Scenario:
    if tasks is not None:
        return ClassIncremental(tasks)
    if dataset.domains:
        return DomainIncremental()
    raise InputError(
        f"{dataset.name} has {len(dataset.classes)} classes and no domains; say how many tasks "
        "they are split into with --tasks."
    )


def _network(spec: str | None, dataset: Dataset, num_classes: int | None) -> nn.Module:
    shape = dataset.train.inputs.shape[1:]
    if spec is not None:
        channels, size = (shape[0], shape[-1]) if len(shape) == 3 else (1, shape[-1])
        return load_network(spec, num_classes, in_channels=channels, image_size=size)
    if len(shape) != 3:
        return mlp(shape.numel(), num_classes)
    if shape[1] == shape[2] >= SMALLEST_FOR_RESNET:
        return slim_resnet18(num_classes, in_channels=shape[0], image_size=shape[1])
    return small_cnn(shape[0], num_classes)


def fitting_transform(inputs: Tensor, *, augment: bool) -> Transform:
    """Normalisation to mean 0 and standard deviation 1, measured on up to 1,000 examples.

    Args:
        inputs: ``[n, channels, height, width]`` or anything else ``[n, ...]``.
        augment: crop and mirror images at random.
    """
    rows = torch.linspace(0, len(inputs) - 1, min(len(inputs), SAMPLES_FOR_STATISTICS)).long()
    scale = 255.0 if inputs.dtype == torch.uint8 else 1.0
    some = inputs[rows].double() / scale
    if inputs.ndim != 4:
        return Transform(scale, (float(some.mean()),), (_positive(some.std()),))
    return Transform(
        scale,
        mean=[float(m) for m in some.mean(dim=(0, 2, 3))],
        std=[_positive(s) for s in some.std(dim=(0, 2, 3))],
        crop_padding=inputs.shape[2] // 8 if augment else 0,
        flip=augment,
    )


def _positive(std: Tensor) -> float:
    """A channel that never changes keeps its scale."""
    value = float(std)
    return value if value > 0 else 1.0
