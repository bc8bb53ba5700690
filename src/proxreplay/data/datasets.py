"""Data sets: examples in memory with their labels, split into train, test and maybe validation."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proxreplay.errors import DataError


@dataclass(frozen=True)
class Examples:
    """Inputs and labels that belong together.

    Args:
        inputs: ``[n, ...]``; images are uint8 ``[n, channels, height, width]``.
        labels: ``[n]``, int64, starting at 0.
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise DataError(
                f"{len(self.inputs)} inputs but {len(self.labels)} labels; give one each."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> "Examples":
        return Examples(self.inputs[indices], self.labels[indices])


@dataclass(frozen=True)
class Dataset:
    """A data set ready to become a stream.

    Args:
        name: as users write it.
        train: what the stream is made of.
        test: for the final accuracy.
        classes: a name for every label.
        validation: where the set brings its own; otherwise the stream sets some aside a task.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    validation: Examples | None = None


def digits() -> Dataset:
    """The 1,797 handwritten digits (8x8, grey values 0 to 16) that scikit-learn bundles.

    The split is fixed and stratified: every fifth image of a class, in stored order, is test, the
    next one validation.

    >>> data = digits()
    >>> len(data.train), len(data.validation), len(data.test)
    (1071, 362, 364)
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    everything = Examples(inputs, labels)
    rank = torch.empty_like(labels)
    for label in labels.unique():
        of_class = labels == label
        rank[of_class] = torch.arange(int(of_class.sum()))
    part = rank % 5
    return Dataset(
        name="digits",
        train=everything[part >= 2],
        test=everything[part == 0],
        validation=everything[part == 1],
        classes=tuple(str(name) for name in bunch.target_names),
    )
