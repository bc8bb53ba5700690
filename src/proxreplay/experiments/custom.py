"""A benchmark from data of your own; settings that are not given are chosen by the data."""

import logging
from pathlib import Path

import torch
from torch import nn

from proxreplay.data import Dataset, Examples, Transform
from proxreplay.data.arrays import from_npz
from proxreplay.data.scenarios import ClassIncremental, DomainIncremental, Scenario
from proxreplay.data.trees import image_tree
from proxreplay.errors import InputError
from proxreplay.experiments.benchmarks import CUSTOM, Benchmark
from proxreplay.models import mlp, slim_resnet18, small_cnn

SMALLEST_FOR_RESNET = 25
SAMPLES_FOR_STATISTICS = 1000
log = logging.getLogger(__name__)


def custom(
    data: str | Path,
    *,
    tasks: int | None = None,
    scenario: Scenario | None = None,
    image_size: int | None = None,
    augment: bool | str | None = None,
) -> Benchmark:
    """A benchmark from a folder or zip of images, or from an ``.npz`` file.

    Args:
        data: see `image_tree` and `from_npz`.
        tasks: class-incremental tasks; None for one task per domain.
        scenario: anything else, instead of ``tasks``.
        image_size: side of the stored images; None to keep a common size.
        augment: ``"crop"`` crops images at random (with a padding of an eighth), True also mirrors
            them, False does neither. None crops colour images of 25 pixels and more. Mirroring is
            never chosen: in many pictures (text, traffic signs) orientation matters.
    """
    path = Path(data)
    dataset = from_npz(path) if path.suffix == ".npz" else image_tree(path, image_size=image_size)
    _check_classes(dataset)
    if scenario is None and tasks is None and not dataset.domains:
        raise InputError(
            f"{dataset.name} has {len(dataset.classes)} classes and no domains; say how many tasks "
            "they are split into with --tasks."
        )
    transform = fitting_transform(dataset.train, augment)
    if augment is None:
        crops = f"crops of {transform.crop_padding} pixels" if transform.crop_padding else "none"
        log.warning(
            "%s: random augmentation: %s, no mirroring (stream.augment=true|crop|false changes it)",
            dataset.name,
            crops,
        )
    return Benchmark(
        name=CUSTOM,
        data=dataset,
        scenario=scenario or (DomainIncremental() if tasks is None else ClassIncremental(tasks)),
        network=lambda num_classes=None: _network(dataset.train.inputs.shape[1:], num_classes),
        transform=transform,
    )


def _check_classes(dataset: Dataset) -> None:
    """Every class and domain needs examples to learn from, and others to be judged on."""
    splits = {"training": dataset.train, "validation": dataset.validation, "test": dataset.test}
    for split, examples in splits.items():
        if examples is None:
            continue
        least = 2 if split == "training" and dataset.validation is None else 1
        ids = [("class", examples.labels, dataset.classes)]
        if examples.domains is not None:
            ids.append(("domain", examples.domains, dataset.domains))
        for kind, of, names in ids:
            counts = torch.bincount(of, minlength=len(names)).tolist()
            for name, count in zip(names, counts, strict=True):
                if count < least:
                    raise InputError(
                        f"{dataset.name}: {kind} '{name}' has {count} {split} examples; give it at "
                        "least 5 examples in all, or a test split with some of each, or remove it."
                    )


def _network(shape: torch.Size, num_classes: int | None) -> nn.Module:
    """`slim_resnet18` on images of 25 pixels and more, `small_cnn` on smaller ones, or `mlp`."""
    if len(shape) != 3:
        return mlp(shape.numel(), num_classes)
    if shape[1] == shape[2] >= SMALLEST_FOR_RESNET:
        return slim_resnet18(num_classes, in_channels=shape[0], image_size=shape[1])
    return small_cnn(shape[0], num_classes)


def fitting_transform(examples: Examples, augment: bool | str | None = None) -> Transform:
    """Normalisation to mean 0 and standard deviation 1, measured on up to 1,000 examples."""
    rows = torch.linspace(0, len(examples) - 1, min(len(examples), SAMPLES_FOR_STATISTICS)).long()
    inputs = examples[rows].inputs
    scale = 255.0 if inputs.dtype == torch.uint8 else 1.0
    some, axes = inputs.double() / scale, (0, 2, 3) if inputs.ndim == 4 else None
    mean, std = some.mean(dim=axes), some.std(dim=axes)
    std[~(std > 0)] = 1  # a channel that never changes keeps its scale
    if inputs.ndim != 4:
        return Transform(scale, (float(mean),), (float(std),))
    if augment is None:
        coloured = inputs.shape[1] == 3 and bool((inputs != inputs[:, :1]).any())
        augment = "crop" if min(inputs.shape[2:]) >= SMALLEST_FOR_RESNET and coloured else False
    return Transform(
        scale,
        mean.tolist(),
        std.tolist(),
        crop_padding=inputs.shape[2] // 8 if augment else 0,
        flip=augment is True,
    )
