"""The digits that scikit-learn bundles: real images without a download."""

import numpy as np

from proxreplay.data.datasets import Dataset, Examples


def digits() -> Dataset:
    """The 1,797 handwritten digits (8x8, grey values 0 to 16) that scikit-learn bundles.

    The split is fixed and stratified: every fifth image of a class, in stored order, is test, the
    next one validation.

    >>> data = digits()
    >>> len(data.train), len(data.validation), len(data.test)
    (1071, 362, 364)
    """
    import torch
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
