"""The learner's edge: arrays and labels of any kind become tensors that are safe to use."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxreplay.errors import InputError

Indices = Tensor  # int64 ``[n]``: which output of the head
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class InputKind:
    """What every input of a learner has in common: the shape and dtype of one example."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, inputs: Tensor) -> "InputKind":
        """The kind of ``inputs [n, ...]``."""
        return cls(tuple(inputs.shape[1:]), inputs.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"shape": self.shape, "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputKind":
        """The inverse of `to_dict`."""
        return cls(tuple(values["shape"]), getattr(torch, values["dtype"]))

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def as_inputs(x: Any, floating: torch.dtype) -> Tensor:
    """Inputs ``[n, ...]`` as a tensor, finite and not empty.

    Args:
        x: a tensor or anything numpy reads as an array of numbers.
        floating: what floating numbers are cast to, the dtype of the model.
    """
    tensor = x.detach() if isinstance(x, Tensor) else _from_array(np.asarray(x))
    if tensor.ndim == 0 or len(tensor) == 0:
        raise InputError(
            f"Learner: inputs of shape {list(tensor.shape)} hold no example; give [n, ...] with n "
            "of at least 1."
        )
    if tensor.is_complex():
        raise InputError("Learner: complex inputs; give real numbers.")
    if tensor.is_floating_point():
        tensor = tensor.to(floating)
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"Learner: inputs hold NaN, infinity or what {floating} cannot hold; clean them "
                "first."
            )
    return tensor


def _from_array(array: NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(
            f"Learner: inputs of dtype {array.dtype}; give numbers, as an array or a tensor."
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch computes with no wider unsigned numbers
    # A writeable copy in native byte order: torch warns about, or refuses, everything else.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


@dataclass(frozen=True)
class Labels:
    """Which label stands for which output of the head.

    Integer labels are their own index. Other labels (strings, bools, tuples: anything hashable) get
    indices in the order of arrival. The first batch decides which of the two it is.

    >>> indices, labels = Labels().meet(["cat", "dog", "cat"])
    >>> indices.tolist(), labels.names
    ([0, 1, 0], ('cat', 'dog'))
    >>> labels.decode(torch.tensor([1, 0])).tolist()
    ['dog', 'cat']
    """

    kind: Literal["unknown", "integers", "names"] = "unknown"
    names: tuple[Hashable, ...] = ()
    _index: dict[Hashable, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {name: i for i, name in enumerate(self.names)})

    def meet(self, y: Any) -> tuple[Indices, "Labels"]:
        """The indices of labels, some maybe new, and the labels known afterwards."""
        given = _read(y)
        self._check_kind(given)
        if isinstance(given, Tensor):
            if len(given) and int(given.min()) < 0:
                raise InputError(
                    f"Learner: label {int(given.min())}; give integers of at least 0, or strings."
                )
            return given, self if self.kind == "integers" else Labels("integers")
        new = [name for name in dict.fromkeys(given) if name not in self._index]
        known = Labels("names", (*self.names, *new)) if new else self
        return known.find(given), known

    def find(self, y: Any) -> Indices:
        """The indices of labels; -1 for those that are not known."""
        given = _read(y)
        self._check_kind(given)
        if isinstance(given, Tensor):
            return given
        return torch.tensor([self._index.get(name, -1) for name in given], dtype=torch.int64)

    def decode(self, indices: Indices) -> Tensor | NDArray[Any]:
        """The labels that indices stand for: a tensor of integers, or an array of names."""
        if self.kind != "names":
            return indices
        names = np.empty(len(indices), dtype=object)  # numpy's own strings lose trailing NULs
        names[:] = [self.names[i] for i in indices.tolist()]
        return names

    def _check_kind(self, given: Tensor | list[Hashable]) -> None:
        kind = "integers" if isinstance(given, Tensor) else "names"
        if self.kind not in (kind, "unknown"):
            raise InputError(
                f"Learner: labels that are {kind}, but earlier ones were {self.kind}; keep to one "
                "of the two."
            )


def _read(y: Any) -> Tensor | list[Hashable]:
    """Integers as an int64 tensor; other labels as a list."""
    if isinstance(y, Tensor | np.ndarray):
        if y.ndim != 1:
            raise InputError(f"Learner: labels of shape {list(y.shape)}; give one an example, [n].")
        if isinstance(y, Tensor) and y.dtype in _INTEGERS:
            return y.detach().to("cpu", torch.int64)
        if isinstance(y, np.ndarray) and y.dtype.kind in "iu":
            return torch.from_numpy(y.astype(np.int64))
        y = y.tolist()
    if not isinstance(y, Sequence) or isinstance(y, str | bytes):
        raise InputError(
            f"Learner: labels of type {type(y).__name__}; give one label an example: a tensor, an "
            "array or a list."
        )
    return _read_list(y)


def _read_list(y: Sequence[Any]) -> Tensor | list[Hashable]:
    labels = [value.item() if isinstance(value, Tensor | np.generic) else value for value in y]
    if all(isinstance(label, int) and not isinstance(label, bool) for label in labels):
        return torch.tensor(labels, dtype=torch.int64)
    for label in labels:
        if label is None or isinstance(label, float) or not isinstance(label, Hashable):
            raise InputError(
                f"Learner: a label {label!r} of type {type(label).__name__}; give integers of at "
                "least 0, or names such as strings."
            )
    return labels
