"""How much examples count: weights of examples and of classes, and means with them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.replay.inputs import as_tensor


def as_weights(given: Any, n: int, floating: torch.dtype) -> Tensor | None:
    """The weights of ``n`` examples, ``[n]``; None if none are given.

    They have the dtype of the model, or float32 where that is wider.
    """
    if given is None:
        return None
    weights = as_tensor(given, "sample_weight")
    weights = weights[None] if weights.ndim == 0 else weights
    if weights.shape != (n,):
        raise InputError(
            f"Learner: sample_weight of shape {list(weights.shape)} for {n} examples; give one "
            "number per example."
        )
    weights = weights.to(torch.promote_types(floating, torch.float32))
    bad = ~(weights >= 0) | weights.isinf()  # NaN is not at least 0
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise InputError(
            f"Learner: sample_weight {float(weights[first])} of example {first}; give finite "
            "numbers of at least 0. An example of weight 0 is left out."
        )
    return weights


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """``sum_i w_i v_i / sum_i w_i``, 0 if nothing has weight; the plain mean without weights."""
    if weight is None:
        return values.mean()
    return (weight * values).sum() / at_least_tiny(weight.sum())


def joint_weight(*batches: Batch) -> Tensor | None:
    """The weights of batches one after the other; 1 where one has none, None if none has any."""
    if all(batch.weight is None for batch in batches):
        return None
    like = next(batch.weight for batch in batches if batch.weight is not None)
    return torch.cat(
        [like.new_ones(len(b)) if b.weight is None else b.weight.to(like) for b in batches]
    )


def as_class_weight(given: Any) -> tuple[tuple[int, float], ...] | None:
    """Weights of classes as pairs of output and weight, checked."""
    if given is None:
        return None
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    pairs = tuple(given.items() if isinstance(given, Mapping) else given)
    if not all(isinstance(pair, tuple | list) for pair in pairs):
        pairs = tuple(enumerate(pairs))
    for output, weight in pairs:
        good = isinstance(output, int) and output >= 0 and isinstance(weight, int | float)
        if not good or not 0 <= weight < math.inf:
            raise InputError(
                f"class_weight: {weight!r} for output {output!r}; give finite numbers of at least "
                "0 by output, such as {0: 1.0, 3: 5.0}. Names have no output before they arrive: "
                "use sample_weight."
            )
    return tuple((output, float(weight)) for output, weight in pairs)


def with_class_weight(batch: Batch, class_weight: Sequence[tuple[int, float]]) -> Batch:
    """The batch, every weight multiplied with that of its class."""
    largest = max((output for output, _ in class_weight), default=-1)
    table = [1.0] * (largest + 2)  # the last: others
    for output, weight in class_weight:
        table[output] = weight
    weights = torch.tensor(table, device=batch.labels.device)
    weights = weights[batch.labels.clamp(max=largest + 1)]
    return batch.with_extras(weight=weights if batch.weight is None else weights * batch.weight)


def at_least_tiny(total: Tensor) -> Tensor:
    """A sum of weights that may be divided by."""
    return total.clamp(min=torch.finfo(total.dtype).tiny)
