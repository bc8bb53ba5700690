"""Which label stands for which output of a head: integers for themselves, names by arrival."""

from collections.abc import Collection, Hashable, Sequence
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


def plain(values: Any) -> Any:
    """An array instead of a column or table of pandas or polars."""
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def is_one_label(y: Any) -> bool:
    """Whether this is one label and no batch of them."""
    if isinstance(y, Tensor | np.ndarray):
        return y.ndim == 0
    return isinstance(y, str | bytes | int | np.generic)


def _read(y: Any) -> Tensor | list[Hashable]:
    """Integers as an int64 tensor; other labels as a list."""
    y = plain(y)
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
        if too_large := [label for label in labels if not -(2**63) <= label < 2**63]:
            raise InputError(f"Learner: label {too_large[0]}; give names, such as str(label).")
        return torch.tensor(labels, dtype=torch.int64)
    for label in labels:
        if label is None or isinstance(label, float) or not isinstance(label, Hashable):
            raise InputError(
                f"Learner: a label {label!r} of type {type(label).__name__}; give integers of at "
                "least 0, or names such as strings."
            )
    return labels
