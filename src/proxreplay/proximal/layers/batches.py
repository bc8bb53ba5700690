"""What a model is called with: a tuple is one call's arguments, a list or iterator is batches."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxreplay.errors import InputError

# Examples per forward pass. More than MANY gained nothing where it was measured (32 x 32 pixels,
# two threads); large inputs are taken fewer at a time, for the memory of their activations.
FEW, MANY, ELEMENTS_AT_ONCE = 20, 200, 1 << 20


def as_batches(
    examples: Any,
    model: nn.Module,
    size: int | None,
    dim: int,
    inputs: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Batches to call a model with.

    Args:
        examples: a tensor, an array, a tuple of arguments or a dict of keyword arguments, which are
            split; or batches of these.
        model: as `unwrap` gives it.
        size: examples per batch where they are split; None for `FEW` to `MANY`, by their size.
        dim: the dimension of the examples.
        inputs: from a batch to what the model is called with.
    """
    if isinstance(examples, Tensor | np.ndarray | tuple | Mapping):
        whole = as_tensors(examples if inputs is None else inputs(examples), model)
        return iter(_split(whole, size, dim))
    if isinstance(examples, str) or not isinstance(examples, Iterable):
        raise InputError(
            f"refresh: {type(examples).__name__} is not something a model is called with; give a "
            "tensor, a tuple of arguments, a dict of keyword arguments, or a list of these."
        )
    if inputs is None:
        if isinstance(examples, list):
            _check_not_arguments(examples, model)
        return (as_tensors(_arguments(batch), model) for batch in examples)
    return (as_tensors(inputs(batch), model) for batch in examples)


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a tensor, a tuple or a dict of its arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if not isinstance(batch, tuple):
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


def count_samples(batch: Any, batch_dim: int = 0) -> int:
    """The size of the first tensor in a batch along the dimension of the examples."""
    for value in _values(batch):
        if isinstance(value, Tensor) and value.ndim > batch_dim:
            return value.shape[batch_dim]
    raise InputError(
        f"refresh: a batch of type {type(batch).__name__} holds no tensor with a dimension "
        f"{batch_dim} of examples; give a tensor, a tuple of arguments or a dict of keyword "
        "arguments of the model."
    )


def as_tensors(batch: Any, model: nn.Module) -> Any:
    """The batch with tensors for arrays, on the model's device and in its precision."""
    if isinstance(batch, Mapping):
        return {name: as_tensors(value, model) for name, value in batch.items()}
    if isinstance(batch, tuple):
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

    def has_examples(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == n

    if size is None:
        each = sum(v.numel() for v in _values(batch) if has_examples(v)) // max(1, n)
        size = min(MANY, max(FEW, ELEMENTS_AT_ONCE // max(1, each)))

    def part(value: Any, start: int) -> Any:
        length = min(size, n - start)
        return value.narrow(dim, start, length) if has_examples(value) else value

    for start in range(0, n, size):
        if isinstance(batch, Mapping):
            yield {name: part(value, start) for name, value in batch.items()}
        elif isinstance(batch, tuple):
            yield tuple(part(value, start) for value in batch)
        else:
            yield part(batch, start)


def _values(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, tuple) else (batch,)


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
