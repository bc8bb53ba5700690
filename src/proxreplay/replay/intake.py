"""What a learner lets in: inputs and labels of any kind become tensors that are safe to use."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from proxreplay.batch import Batch
from proxreplay.errors import InputError

Indices = Tensor  # int64 ``[n]``: which output of the head
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Intake:
    """What a learner has met so far; only a batch that is good in all respects changes it.

    Args:
        floating: the dtype of the model, to which floating inputs are cast.
        growing: whether the model has a head that grows with the labels.
    """

    def __init__(self, floating: torch.dtype, *, growing: bool) -> None:
        self.floating = floating
        self.growing = growing
        self.labels = Labels()
        self.kind: InputKind | None = None
        self.outputs: int | None = None  # of a fixed head

    def admit(self, x: Any, y: Any, try_out: Callable[[Tensor], int]) -> Batch:
        """Check a stream batch and take note of what is new in it.

        Args:
            x: inputs ``[n, ...]``, or a `Batch` (without ``y``).
            y: labels ``[n]``.
            try_out: from inputs to the number of outputs that the model has for them.
        """
        given = x if isinstance(x, Batch) else None
        if (given is None) == (y is None):
            raise InputError("Learner: give inputs and labels, or one Batch.")
        if given is not None:
            x, y = given.inputs, given.labels
        inputs = self.check(x)
        indices, labels = self.labels.meet(y)
        batch = Batch(
            inputs,
            indices,
            position=None if given is None else given.position,
            train=given is None or given.train,
        )
        outputs = self.outputs
        if self.kind is None or (outputs is None and not self.growing):
            outputs = try_out(inputs[:1])
        if not self.growing and outputs is not None and int(indices.max()) >= outputs:
            raise InputError(
                f"Learner: {int(indices.max()) + 1} classes, but the model has {outputs} outputs; "
                "build it with more, or with a growing head (num_classes=None)."
            )
        self.labels, self.kind = labels, InputKind.of(inputs)
        self.outputs = None if self.growing else outputs
        return batch

    def check(self, x: Any) -> Tensor:
        """Inputs as a tensor, if they are of the same kind as earlier ones."""
        inputs = as_inputs(x, self.floating)
        kind = InputKind.of(inputs)
        if self.kind is not None and kind != self.kind:
            raise InputError(
                f"Learner: inputs of {kind} each, but earlier ones were {self.kind}; keep to one "
                "shape and dtype."
            )
        return inputs

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "labels": {"kind": self.labels.kind, "names": self.labels.names},
            "inputs": None if self.kind is None else self.kind.to_dict(),
            "outputs": self.outputs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.labels = Labels(**state["labels"])
        self.kind = None if state["inputs"] is None else InputKind.from_dict(state["inputs"])
        self.outputs = state["outputs"]


def stream_batches(source: Any, y: Any, batch_size: int) -> Iterable[Any]:
    """What a source holds, as stream batches: each a `Batch` or ``(inputs, labels)``."""
    if y is not None:
        if len(source) != len(y):
            raise InputError(
                f"Learner.learn_stream: {len(source)} inputs but {len(y)} labels; give one each."
            )
        starts = range(0, len(source), batch_size)
        return ((source[i : i + batch_size], y[i : i + batch_size]) for i in starts)
    if isinstance(source, Dataset):
        # A generator of its own: a DataLoader would draw a seed from the global one.
        return DataLoader(source, batch_size=batch_size, generator=torch.Generator())
    if isinstance(source, Iterable):
        return source
    raise InputError(
        f"Learner.learn_stream: a {type(source).__name__}; give arrays x and y, a Dataset, or an "
        "iterable of batches."
    )


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
            raise InputError(
                f"Learner: labels of shape {list(y.shape)}; give one per example, [n]."
            )
        if isinstance(y, Tensor) and y.dtype in _INTEGERS:
            return y.detach().to("cpu", torch.int64)
        if isinstance(y, np.ndarray) and y.dtype.kind in "iu":
            return torch.from_numpy(y.astype(np.int64))
        y = y.tolist()
    if not isinstance(y, Sequence) or isinstance(y, str | bytes):
        raise InputError(
            f"Learner: labels of type {type(y).__name__}; give one label per example: a tensor, "
            "an array or a list."
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
