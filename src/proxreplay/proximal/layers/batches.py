"""What a model is called with: a tuple is one call's arguments, a list or iterator is batches."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from proxreplay.distributed import Processes
from proxreplay.errors import InputError

# Examples per forward pass. More than MANY gained nothing where it was measured (32 x 32 pixels,
# two threads); large inputs are taken fewer at a time, for the memory of their activations.
FEW, MANY, ELEMENTS_AT_ONCE = 20, 200, 1 << 20


Mask = Tensor | np.ndarray | Callable[[Any], Any] | bool | None
"""Which places of examples are data: ``[n, T]``, or a function from a batch to that; False: all."""


@dataclass(frozen=True)
class Padded:
    """A call with a mask of its own."""

    call: Any  # what the model is called with
    mask: Any  # [n, T], 1 for data and 0 for padding; None if all is data


def with_mask(examples: Any, mask: Mask) -> Any:
    """Examples together with the mask given for them; a function of batches is left for later."""
    if mask is None or mask is False or callable(mask):
        return examples
    if mask is True:
        raise InputError(
            "refresh: mask=True; give a mask, a function from a batch to one, or False."
        )
    if not _is_one(examples):
        raise InputError(
            "refresh: one mask for several batches; give a function from a batch to its mask, "
            "refresh(loader, mask=lambda batch: ...)."
        )
    return Padded(examples, mask)


def as_batches(
    examples: Any,
    model: nn.Module,
    size: int | None,
    dim: int,
    inputs: Callable[[Any], Any] | None = None,
    mask: Mask = None,
) -> Iterator[Any]:
    """Batches to call a model with.

    Args:
        examples: a tensor, an array, a tuple of arguments or a dict of keyword arguments, which are
            split; or batches of these.
        model: as `unwrap` gives it.
        size: examples per batch where they are split; None for `FEW` to `MANY`, by their size.
        dim: the dimension of the examples.
        inputs: from a batch to what the model is called with.
        mask: from a batch to its mask; False for none. One for all examples is in a `Padded`.
    """
    if inputs is not None and not callable(inputs):
        raise InputError(
            f"refresh: inputs={inputs!r}; give a function from a batch to what the model is called "
            "with, such as inputs=lambda batch: batch[0]."
        )

    def prepared(batch: Any) -> Any:
        if isinstance(batch, Padded):
            return as_tensors(Padded(prepared(batch.call), batch.mask), model)
        seen = as_tensors(batch if inputs is None else inputs(batch), model)
        if mask is False or callable(mask):
            return Padded(seen, as_tensors(mask(batch), model) if callable(mask) else None)
        return seen

    if _is_one(examples):
        return iter(_split(prepared(examples), size, dim))
    if isinstance(examples, str) or not isinstance(examples, Iterable):
        raise InputError(
            f"refresh: {type(examples).__name__} is not something a model is called with; give a "
            "tensor, a tuple of arguments, a dict of keyword arguments, or a list of these."
        )
    if inputs is None:
        if isinstance(examples, list):
            _check_not_arguments(examples, model)
        return (prepared(_arguments(batch)) for batch in examples)
    return map(prepared, examples)


def own_share(examples: Any, processes: Processes, dim: int) -> Any:
    """What this process takes of examples that all processes have; None for nothing.

    Args:
        examples: as for `as_batches`. Of batches, a process takes every so many.
        processes: that share them; `ALONE` for all of them.
        dim: the dimension of the examples.
    """
    if _is_one(examples):
        whole = as_tensors(examples, nn.Module())
        if any(isinstance(value, PackedSequence) for value in _values(whole)):
            return whole if processes.rank == 0 else None  # packed sequences stay together
        n = count_samples(whole, dim)
        return _part(whole, n, dim, processes.share(n)) if processes.rank < n else None
    chosen = islice(examples, processes.rank, None, processes.size)
    return chain([first], chosen) if (first := next(chosen, None)) is not None else None


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a tensor, a tuple or a dict of its arguments."""
    if isinstance(batch, Mapping):
        try:
            inspect.signature(model.forward).bind(**batch)
        except TypeError as error:
            raise InputError(
                f"refresh: {type(model).__name__} cannot be called with {sorted(batch)} ({error}). "
                "A dict is the keyword arguments of one call; give all that forward needs, or say "
                "which part of a batch that is, refresh(loader, inputs=...)."
            ) from error
        try:
            return model(**batch)
        except (RuntimeError, IndexError) as error:
            _check_lengths(model, batch, error)
            raise
    if not _is_arguments(batch):
        return model(batch)
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError as error:
        raise InputError(
            f"refresh: {type(model).__name__} cannot be called with {len(batch)} arguments "
            f"({error}). A tuple is the arguments of one call; for several batches give a list, "
            "refresh([a, b]); for batches of (inputs, labels) say which part the model sees, "
            "refresh(loader, inputs=lambda batch: batch[0])."
        ) from error
    return model(*batch)


def _check_lengths(model: nn.Module, batch: Mapping[str, Any], error: Exception) -> None:
    """Name tensors of different length, which a model may refuse; some models want them."""
    lengths = {name: len(v) for name, v in batch.items() if isinstance(v, Tensor) and v.ndim}
    if len(set(lengths.values()) - {1}) > 1:
        raise InputError(
            f"refresh: the tensors of a dict differ in length ({lengths}), and "
            f"{type(model).__name__} fails with them ({error}); give one row per example."
        ) from error


def count_samples(batch: Any, batch_dim: int = 0) -> int:
    """The size of the first tensor in a batch along the dimension of the examples."""
    for value in _values(batch):
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        if isinstance(value, Tensor) and value.ndim > batch_dim:
            return value.shape[batch_dim]
    raise InputError(
        f"refresh: a batch of type {type(batch).__name__} holds no tensor with a dimension "
        f"{batch_dim} of examples; give a tensor, a tuple of arguments or a dict of keyword "
        "arguments of the model."
    )


def as_tensors(batch: Any, model: nn.Module) -> Any:
    """The batch with tensors for arrays, on the model's device and in its precision."""
    if isinstance(batch, Padded):
        return Padded(as_tensors(batch.call, model), as_tensors(batch.mask, model))
    if isinstance(batch, Mapping):
        return {name: as_tensors(value, model) for name, value in batch.items()}
    if _is_arguments(batch):
        return tuple(as_tensors(value, model) for value in batch)
    if not isinstance(batch, np.ndarray):
        return batch
    tensor = torch.as_tensor(batch)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        return tensor
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def _split(batch: Any, size: int | None, dim: int) -> Iterator[Any]:
    """A batch in parts; what has no dimension of as many examples goes with every part."""
    n = count_samples(batch, dim)
    if any(isinstance(value, PackedSequence) for value in _values(batch)):
        yield batch  # packed sequences stay together
        return
    if size is None:
        each = sum(v.numel() for v in _values(batch) if _has_examples(v, n, dim)) // max(1, n)
        size = min(MANY, max(FEW, ELEMENTS_AT_ONCE // max(1, each)))

    for start in range(0, n, size):
        yield _part(batch, n, dim, slice(start, start + size))


def _part(batch: Any, n: int, dim: int, rows: slice) -> Any:
    """Some of the ``n`` examples of a batch; what has no dimension of as many stays as it is."""

    def part(value: Any) -> Any:
        return value[(slice(None),) * dim + (rows,)] if _has_examples(value, n, dim) else value

    if isinstance(batch, Padded):
        whole = isinstance(batch.mask, Tensor) and _has_examples(batch.mask, n, 0)
        mask = batch.mask[rows] if whole else batch.mask
        return Padded(_part(batch.call, n, dim, rows), mask)
    if isinstance(batch, Mapping):
        return {name: part(value) for name, value in batch.items()}
    return tuple(map(part, batch)) if _is_arguments(batch) else part(batch)


def _has_examples(value: Any, n: int, dim: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == n


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors that the model is called with, in order."""
    return (value for value in _values(batch) if isinstance(value, Tensor))


def _is_one(examples: Any) -> bool:
    """Whether examples are one call, not batches of them; a PackedSequence is a tuple."""
    return isinstance(examples, Tensor | np.ndarray | tuple | Mapping | Padded)


def _values(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Padded):
        return _values(batch.call)
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if _is_arguments(batch) else (batch,)


def _is_arguments(batch: Any) -> bool:
    """Whether a batch is the arguments of a call; packed sequences are tuples, but one argument."""
    return isinstance(batch, tuple) and not isinstance(batch, PackedSequence)


def _arguments(batch: Any) -> Any:
    """A batch as it came; a list, as a DataLoader makes it, does not say what its parts are."""
    if not isinstance(batch, list):
        return batch
    if len(batch) == 1:
        return tuple(batch)
    raise InputError(
        f"refresh: a batch is a list of {len(batch)} parts, which may be arguments of the model or "
        "labels. Say which it is called with: refresh(loader, inputs=lambda batch: batch[0]) for "
        "the first only, refresh(loader, inputs=tuple) for all of them."
    )


def _check_not_arguments(examples: list[Any], model: nn.Module) -> None:
    """Refuse a list of tensors that might as well be the arguments of one call."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    accepted = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    alike = all(isinstance(one, Tensor | np.ndarray) for one in examples)
    if alike and 2 <= len(examples) <= len(accepted):
        raise InputError(
            f"refresh: a list of {len(examples)} tensors may be batches or the arguments of one "
            f"call, as {type(model).__name__} takes {len(accepted)}. Give [(a,), (b,)] for "
            "batches, (a, b) for arguments."
        )
