"""What a learner lets in: inputs and labels of any kind become tensors that are safe to use."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead

Indices = Tensor  # int64 ``[n]``: which output of the head
REACH = 10_000  # how far an integer label may be beyond the outputs of a growing head
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Intake:
    """What a learner has met so far; only a batch that is good in all respects changes it.

    Args:
        floating: the dtype of the model, to which floating inputs are cast.
        heads: those of the model that grow with the labels.
    """

    def __init__(self, floating: torch.dtype, heads: Sequence[GrowingHead]) -> None:
        self.floating = floating
        self.heads = heads
        self.labels = Labels()
        self.kind: InputKind | None = None
        self.outputs: int | None = None  # of a fixed head

    def admit(
        self,
        x: Any,
        y: Any,
        try_out: Callable[[Tensor], int],
        check: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """Check a stream batch and take note of what is new in it.

        Args:
            x: inputs ``[n, ...]``, or a `Batch` (without ``y``), or one example.
            y: labels ``[n]``, or that of the one example.
            try_out: from inputs to the number of outputs that the model has for them.
            check: raises if there is something else against the batch.
        """
        given = x if isinstance(x, Batch) else None
        if (given is None) == (y is None):
            raise InputError("Learner: give inputs and labels, or one Batch.")
        if given is not None:
            x, y = given.inputs, given.labels
        if _is_one_label(y):
            x, y = as_tensor(x)[None], [y]
        inputs = self.check(x)
        indices, labels = self.labels.meet(y)
        batch = Batch(
            inputs,
            indices,
            position=None if given is None else given.position,
            train=given is None or given.train,
        )
        self.check_reach(indices)
        outputs = self.outputs
        if self.kind is None or (outputs is None and not self.heads):
            outputs = try_out(inputs[:1])
        if not self.heads and outputs is not None and int(indices.max()) >= outputs:
            raise InputError(
                f"Learner: {int(indices.max()) + 1} classes, but the model has {outputs} outputs; "
                "build it with more, or with a growing head (num_classes=None)."
            )
        check(batch)
        self.labels, self.kind = labels, InputKind.of(inputs)
        self.outputs = None if self.heads else outputs
        return batch

    def check_reach(self, indices: Tensor) -> None:
        """Refuse integer labels for which a head would have to grow out of all proportion."""
        largest = int(indices.max())
        for head in self.heads:
            if largest >= head.out_features + REACH:
                raise InputError(
                    f"Learner: label {largest}, but the head has {head.out_features} outputs and "
                    f"would need one for every integer up to it. Give names, such as strings "
                    f"(str(label)): they get outputs in the order of arrival. Or call "
                    f"grow({largest + 1}) of the head first, if there are so many classes."
                )

    def forget(self, label: Any) -> int:
        """The index of a label that is not to be known any more; refused if it was never met."""
        (index,) = self.labels.find([label]).tolist()
        if index not in self.labels.met:
            raise InputError(f"Learner.forget: label {label!r} was never met, or is forgotten.")
        self.labels = self.labels.without(index)
        return int(index)

    def check(self, x: Any) -> Tensor:
        """Inputs as a tensor, if they are of the same kind as earlier ones."""
        tensor = as_tensor(x)
        if self.kind is not None and tuple(tensor.shape) == self.kind.shape:
            tensor = tensor[None]  # one example
        inputs = as_inputs(tensor, self.floating)
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
            "labels": {
                "kind": self.labels.kind,
                "names": self.labels.names,
                "met": tuple(sorted(self.labels.met)),
            },
            "inputs": None if self.kind is None else self.kind.to_dict(),
            "outputs": self.outputs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.labels = Labels(**state["labels"])
        self.kind = None if state["inputs"] is None else InputKind.from_dict(state["inputs"])
        self.outputs = state["outputs"]


def stream_batches(source: Any, y: Any, batch_size: int) -> Iterable[tuple[Any, Any]]:
    """What a source holds, as the two arguments of `Learner.learn`."""
    if y is not None:
        source, y = _plain(source), _plain(y)
        if len(source) != len(y):
            raise InputError(
                f"Learner.learn_stream: {len(source)} inputs but {len(y)} labels; give one each."
            )
        starts = range(0, len(source), batch_size)
        return ((source[i : i + batch_size], y[i : i + batch_size]) for i in starts)
    if isinstance(source, Dataset):
        # A generator of its own: a DataLoader would draw a seed from the global one.
        return DataLoader(source, batch_size=batch_size, generator=torch.Generator())
    if isinstance(source, Batch):
        return [(source, None)]
    if isinstance(source, Iterable):
        return _grouped(source, batch_size)
    raise InputError(
        f"Learner.learn_stream: a {type(source).__name__}; give arrays x and y, a Dataset, or an "
        "iterable of batches or single examples."
    )


def _grouped(source: Iterable[Any], batch_size: int) -> Iterator[tuple[Any, Any]]:
    """Batches as they are; single examples ``(x, y)`` by ``batch_size``."""
    waiting: list[tuple[Any, Any]] = []
    for item in chain(source, [None]):
        if isinstance(item, Batch):
            pair: tuple[Any, Any] | None = (item, None)
        elif item is None or (isinstance(item, tuple | list) and len(item) == 2):
            pair = None if item is None else (item[0], item[1])
        else:
            raise InputError(
                f"Learner: a source of {type(item).__name__}; give Batch objects or pairs (x, y)."
            )
        single = pair is not None and pair[1] is not None and _is_one_label(pair[1])
        if waiting and (not single or len(waiting) == batch_size):
            inputs, labels = zip(*waiting, strict=True)
            yield torch.stack([as_tensor(x) for x in inputs]), list(labels)
            waiting = []
        if single and pair is not None:
            waiting.append(pair)
        elif pair is not None:
            yield pair


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


def as_tensor(x: Any) -> Tensor:
    """A tensor as it is, detached; anything numpy reads as an array of numbers as a tensor."""
    if not isinstance(x, Tensor):
        try:
            return _from_array(np.asarray(x))
        except (ValueError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"Learner: inputs that are no array of numbers ({error}); give every example the "
                "same shape."
            ) from error
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise InputError("Learner: sparse, nested or quantized inputs; give a dense tensor.")
    if x.is_meta:
        raise InputError("Learner: inputs on the meta device hold no values; give real ones.")
    return x.detach()


def as_inputs(x: Any, floating: torch.dtype) -> Tensor:
    """Inputs ``[n, ...]`` as a tensor, finite and not empty.

    Args:
        x: see `as_tensor`.
        floating: what floating numbers are cast to, the dtype of the model.
    """
    tensor = as_tensor(x)
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
            f"Learner: inputs of dtype {array.dtype}; give numbers, as a dense array or a tensor."
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
    names: tuple[Hashable, ...] = ()  # None for one that is forgotten
    met: Collection[int] = frozenset()  # indices
    _index: dict[Hashable, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {name: i for i, name in enumerate(self.names) if name is not None}
        object.__setattr__(self, "_index", index)
        met = frozenset(index.values() if self.kind == "names" else self.met)
        object.__setattr__(self, "met", met)

    def without(self, index: int) -> "Labels":
        """Without a label; its index is not given to another."""
        names = tuple(None if i == index else name for i, name in enumerate(self.names))
        return Labels(self.kind, names, frozenset(self.met) - {index})

    def meet(self, y: Any) -> tuple[Indices, "Labels"]:
        """The indices of labels, some maybe new, and the labels known afterwards."""
        given = _read(y)
        self._check_kind(given)
        if isinstance(given, Tensor):
            if len(given) and int(given.min()) < 0:
                raise InputError(
                    f"Learner: label {int(given.min())}; give integers of at least 0, or strings."
                )
            met = frozenset(given.tolist()).union(self.met)
            same = self.kind == "integers" and len(met) == len(self.met)
            return given, self if same else Labels("integers", met=met)
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

    def decode(self, indices: Indices) -> NDArray[Any]:
        """The labels that indices stand for: an array of int64 or of names."""
        if self.kind != "names":
            return indices.cpu().numpy()
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


def _plain(values: Any) -> Any:
    """An array instead of a column or table of pandas or polars."""
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def _is_one_label(y: Any) -> bool:
    if isinstance(y, Tensor | np.ndarray):
        return y.ndim == 0
    return isinstance(y, str | bytes | int | np.generic)


def _read(y: Any) -> Tensor | list[Hashable]:
    """Integers as an int64 tensor; other labels as a list."""
    y = _plain(y)
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
