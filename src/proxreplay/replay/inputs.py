"""Inputs of any kind as tensors that are safe to use, and what all inputs of a learner share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxreplay.batch import WHOLE, Inputs, check_same_length, each, named, unnamed
from proxreplay.errors import InputError


@dataclass(frozen=True)
class TensorKind:
    """The shape and dtype of one example."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {_dtype_name(self.dtype)}"


@dataclass(frozen=True)
class InputKind:
    """What every input of a learner has in common."""

    tensors: dict[str, TensorKind]  # the kind of each tensor, by the names that `named` gives

    @classmethod
    def of(cls, inputs: Inputs) -> "InputKind":
        """The kind of ``inputs [n, ...]``."""
        return cls({n: TensorKind(tuple(t.shape[1:]), t.dtype) for n, t in named(inputs).items()})

    @property
    def plain(self) -> bool:
        """Whether inputs are one tensor."""
        return WHOLE in self.tensors

    def is_one(self, inputs: Inputs) -> bool:
        """Whether inputs are one example and not a batch of them."""
        shapes = {name: tuple(tensor.shape) for name, tensor in named(inputs).items()}
        return shapes == {name: kind.shape for name, kind in self.tensors.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        kinds = self.tensors.items()
        tensors = {n: {"shape": kind.shape, "dtype": _dtype_name(kind.dtype)} for n, kind in kinds}
        return tensors[WHOLE] if self.plain else {"tensors": tensors}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputKind":
        """The inverse of `to_dict`."""
        kinds = values.get("tensors", {WHOLE: values}).items()
        return cls({n: TensorKind(tuple(k["shape"]), getattr(torch, k["dtype"])) for n, k in kinds})

    def __str__(self) -> str:
        if self.plain:
            return str(self.tensors[WHOLE])
        return "(" + ", ".join(f"{name} {kind}" for name, kind in self.tensors.items()) + ")"


def is_structured(x: Any) -> bool:
    """Whether inputs are a dict or tuple of tensors; a list of tensors is a batch of examples."""
    if isinstance(x, Mapping):
        return True
    arrays = isinstance(x, tuple) and all(isinstance(part, Tensor | np.ndarray) for part in x)
    return arrays and any(part.ndim > 0 for part in x)


def as_tensors(x: Any) -> Inputs:
    """Inputs in the form they have: a tensor, or a dict or tuple of tensors."""
    if not is_structured(x):
        return as_tensor(x)
    if isinstance(x, Mapping):
        for name in x:
            if not isinstance(name, str):
                raise InputError(f"Learner: a dict of inputs with the key {name!r}; give strings.")
        x = dict(x)  # of mappings of other people
    return unnamed({name: as_tensor(part, name) for name, part in named(x).items()})


def as_tensor(x: Any, name: str = WHOLE) -> Tensor:
    """A tensor as it is, detached; anything numpy reads as an array of numbers as a tensor."""
    if not isinstance(x, Tensor):
        try:
            return _from_array(np.asarray(x), name)
        except (ValueError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"Learner: {name} that are no array of numbers ({error}); give every example the "
                "same shape."
            ) from error
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise InputError(f"Learner: sparse, nested or quantized {name}; give a dense tensor.")
    if x.is_meta:
        raise InputError(f"Learner: {name} on the meta device hold no values; give real ones.")
    return x.detach()


def as_inputs(x: Any, floating: torch.dtype) -> Inputs:
    """Inputs ``[n, ...]`` as finite tensors of equal length, floating ones of one dtype."""
    tensors = named(as_tensors(x))
    inputs = unnamed({name: _safe(tensor, floating, name) for name, tensor in tensors.items()})
    check_same_length(inputs, "Learner")
    return inputs


def as_batch_of_one(x: Any) -> Inputs:
    """One example as a batch."""
    return each(as_tensors(x), lambda tensor: tensor[None])


def _safe(tensor: Tensor, floating: torch.dtype, name: str) -> Tensor:
    """A tensor that holds examples and nothing that spreads."""
    if tensor.ndim == 0 or len(tensor) == 0:
        raise InputError(
            f"Learner: {name} of shape {list(tensor.shape)} hold no example; give [n, ...] with n "
            "of at least 1."
        )
    if tensor.is_complex():
        raise InputError(f"Learner: complex {name}; give real numbers.")
    if tensor.is_floating_point():
        tensor = tensor.to(floating)
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"Learner: {name} hold NaN, infinity or what {floating} cannot hold; clean them "
                "first."
            )
    return tensor


def _from_array(array: NDArray[Any], name: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(
            f"Learner: {name} of dtype {array.dtype}; give numbers, as a dense array or a tensor."
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch computes with no wider unsigned numbers
    # A writeable copy in native byte order: torch warns about, or refuses, everything else.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
