"""The digits that scikit-learn bundles: real images without a download."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from proxreplay.data.datasets import Dataset, Examples, rank_in_group


def load() -> Dataset:
    """The 1,797 handwritten digits (8x8, grey values 0 to 16) that scikit-learn bundles.

    The split is fixed and stratified: every fifth image of a class, in stored order, is test, the
    next one validation.

    >>> data = load()
    >>> len(data.train), len(data.validation), len(data.test)
    (1071, 362, 364)
    """
    bunch = load_digits()
    inputs = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    everything, place = Examples(inputs, labels), rank_in_group(labels) % 5
    return Dataset(
        name="digits",
        train=everything[place >= 2],
        test=everything[place == 0],
        validation=everything[place == 1],
        classes=tuple(str(name) for name in bunch.target_names),
    )
