"""Where batches come from: arrays, data sets, loaders and iterables of batches or examples."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from proxreplay.batch import Batch, check_same_length, merged, part
from proxreplay.errors import InputError
from proxreplay.replay.inputs import as_tensors, is_structured
from proxreplay.replay.labels import is_one_label, plain

LABELS = ("labels", "label")  # where a dict of other people has its labels

Item = tuple[Any, Any, Any]
"""Inputs, labels and weights: the arguments of `Learner.learn`; the latter two may be None."""


def stream_batches(
    source: Any, y: Any, batch_size: int, sample_weight: Any = None
) -> Iterable[Item]:
    """What a source holds, as the arguments of `Learner.learn`."""
    if y is not None:
        return _slices(source, y, sample_weight, batch_size)
    if sample_weight is not None:
        raise InputError(
            "Learner.learn_stream: sample_weight without y; let the source give (x, y, weight)."
        )
    if isinstance(source, Dataset):
        # A generator of its own: a DataLoader would draw a seed from the global one.
        source = DataLoader(source, batch_size=batch_size, generator=torch.Generator())
    if isinstance(source, DataLoader) and source.collate_fn is default_collate:
        source = map(_tuples_again, source)
    if isinstance(source, Batch):
        return [(source, None, None)]
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return _grouped(source, batch_size)
    raise InputError(
        f"Learner.learn_stream: a {type(source).__name__}; give arrays x and y, a Dataset, or an "
        "iterable of batches or single examples."
    )


def _slices(source: Any, y: Any, weight: Any, batch_size: int) -> Iterator[Item]:
    structured = is_structured(source)
    source = as_tensors(source) if structured else plain(source)
    y, weight = plain(y), plain(weight)
    n = check_same_length(source, "Learner.learn_stream") if structured else len(source)
    for name, values in (("labels", y), ("weights", weight)):
        if values is not None and n != len(values):
            raise InputError(
                f"Learner.learn_stream: {n} inputs but {len(values)} {name}; give one each."
            )
    rows = [slice(start, start + batch_size) for start in range(0, n, batch_size)]
    take: Any = part if structured else getitem
    return ((take(source, at), y[at], None if weight is None else weight[at]) for at in rows)


def _tuples_again(item: Any) -> Any:
    """What a DataLoader has made of a pair; tuples of inputs have become lists."""
    if isinstance(item, list) and item and isinstance(item[0], list):
        return (tuple(item[0]), *item[1:])
    return item


def _grouped(source: Iterable[Any], batch_size: int) -> Iterator[Item]:
    """Batches as they are; single examples by ``batch_size``."""
    waiting: list[Item] = []
    for item in chain(map(as_item, source), [None]):
        single = item is not None and item[1] is not None and is_one_label(item[1])
        if waiting and (not single or len(waiting) == batch_size):
            yield _together(waiting)
            waiting = []
        if single and item is not None:
            waiting.append(item)
        elif item is not None:
            yield item


def as_item(item: Any) -> Item:
    """What a source gave: a `Batch`, ``(x, y)``, ``(x, y, weight)``, or a dict with its labels."""
    if isinstance(item, Batch):
        return item, None, None
    if isinstance(item, Mapping):
        for name in LABELS:
            if name in item:
                return {k: v for k, v in item.items() if k != name}, item[name], None
        raise InputError(
            f"Learner: a source of dicts with {sorted(map(str, item))}; put the labels there as "
            "'labels', or give pairs (x, y)."
        )
    if isinstance(item, tuple | list) and len(item) in (2, 3):
        return item[0], item[1], item[2] if len(item) == 3 else None
    raise InputError(
        f"Learner: a source of {type(item).__name__}; give Batch objects or pairs (x, y); "
        "(x, y, weight) for weighted examples."
    )


def _together(examples: list[Item]) -> Item:
    """Single examples as one batch."""
    inputs, labels, weights = zip(*examples, strict=True)
    together = merged([as_tensors(x) for x in inputs], torch.stack)
    if all(weight is None for weight in weights):
        return together, list(labels), None
    return together, list(labels), [1.0 if weight is None else weight for weight in weights]
