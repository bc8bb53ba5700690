"""One stream batch from the shares that several processes were handed."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxreplay.batch import Batch, each, named, unnamed
from proxreplay.distributed import Processes
from proxreplay.errors import InputError


def joined(processes: Processes, x: Any, y: Any, weight: Any = None) -> tuple[Any, Any, Any, slice]:
    """The examples of all processes as one batch, and which of them are those of this process.

    Args:
        processes: each with a share of its own.
        x: inputs ``[n, ...]`` (a tensor, an array, or a dict or tuple of them), or a `Batch`.
        y: labels ``[n]``; None with a `Batch`.
        weight: of the examples, ``[n]``, or None.
    """
    own, names = processes.together("learn", lambda: _share(x, y, weight))
    n = len(next(iter(own.values())))
    layout: dict[str, Any] = {k: (one.dtype, tuple(one.shape[1:])) for k, one in own.items()}
    if names is not None:
        layout["labels"] = "names"
    moment = (x.position, x.train) if isinstance(x, Batch) else None
    said = processes.tell((n, layout, names, moment))
    counts = [count for count, *_ in said]
    for rank, (count, layout, _, moment) in enumerate(said):
        if (layout, moment) != said[0][1::2]:
            raise InputError(
                f"Learner: process {rank} was handed {count} examples of another kind "
                f"({layout}, {moment}) than process 0 ({said[0][1]}, {said[0][3]}); hand all "
                "processes the same kind."
            )
    rows = processes.gather(list(own.values()), counts)
    tensors = dict(zip(own, rows, strict=True))
    start = sum(counts[: processes.rank])
    labels: Any = tensors.pop("labels", None)
    if labels is None:
        labels = [name for _, _, names, _ in said for name in names or ()]
    weights, mine = tensors.pop("weight", None), slice(start, start + n)
    inputs = unnamed(tensors)
    if isinstance(x, Batch):
        extras = {} if weights is None else {"weight": weights}
        return replace(x, inputs=inputs, labels=labels, extras=extras), None, None, mine
    return inputs, labels, weights, mine


def _share(x: Any, y: Any, weight: Any) -> tuple[dict[str, Tensor], list[Any] | None]:
    """What this process was handed, one row per example: tensors by name, labels by name.

    Labels that are numbers are among the tensors, and so are weights.
    """
    if isinstance(x, Batch):
        x, y, weight = x.inputs, x.labels, x.weight if weight is None else weight
    tensors = named(each(x, _tensor) if isinstance(x, dict | tuple) else _tensor(x))
    names = None
    if isinstance(y, Tensor) or np.asarray(y).dtype.kind in "iub":
        tensors["labels"] = _tensor(y)
    else:
        names = list(y)
    if weight is not None:
        tensors["weight"] = _tensor(weight)
    lengths = {name: len(one) if one.ndim else None for name, one in tensors.items()}
    if names is not None:
        lengths["labels"] = len(names)
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise InputError(
            f"Learner: {lengths} rows; with several processes, hand each a batch with one row per "
            "example, also for a single one."
        )
    return tensors, names


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
