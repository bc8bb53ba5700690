"""Data sets: examples with their labels and domains, split into train, test, maybe validation."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxreplay.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Inputs, labels and maybe domains that belong together.

    The inputs may be in a memory-mapped file. Indexing with a tensor copies only those rows, after
    ``check`` has compared them with their checksums.

    Args:
        inputs: ``[n, ...]``; images are uint8 ``[n, channels, height, width]``.
        labels: ``[n]``, int64, starting at 0.
        domains: ``[n]``, int64, starting at 0; None if the data has no domains.
        check: is called with the rows ``[k]`` before they are read.
    """

    inputs: "Tensor"
    labels: "Tensor"
    domains: "Tensor | None" = None
    check: "Callable[[Tensor], None] | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, tensor in (("labels", self.labels), ("domains", self.domains)):
            if tensor is not None and tensor.shape != self.inputs.shape[:1]:
                raise DataError(
                    f"{len(self.inputs)} inputs but {name} of shape {tuple(tensor.shape)}; "
                    "give one each."
                )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: "Tensor") -> "Examples":
        if self.check is not None:
            self.check(rows)
        domains = None if self.domains is None else self.domains[rows]
        return Examples(self.inputs[rows], self.labels[rows], domains)


@dataclass(frozen=True)
class Dataset:
    """A data set ready to become a stream.

    Args:
        name: as users write it.
        train: what the stream is made of.
        test: for the final accuracy.
        classes: a name for every label.
        validation: if the set has its own; otherwise the stream sets some aside per task.
        domains: a name for every domain; empty if the data has none.
        checksum: if it is known without reading everything; see `digest`.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    validation: Examples | None = None
    domains: tuple[str, ...] = ()
    checksum: str | None = None

    def digest(self) -> str:
        """SHA-256 that changes with any example; from the cache, or over everything in memory."""
        if self.checksum is not None:
            return self.checksum
        content = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            if part is not None:
                for tensor in (part.inputs, part.labels, part.domains):
                    if tensor is not None:
                        content.update(tensor.contiguous().numpy().data)
        return content.hexdigest()

    def __post_init__(self) -> None:
        parts: dict[str, Any] = {"train": self.train, "test": self.test}
        if self.validation is not None:
            parts["validation"] = self.validation
        for part, examples in parts.items():
            self._check(f"{part} labels", examples.labels, self.classes, "classes")
            if self.domains:
                self._check(f"{part} domains", examples.domains, self.domains, "domains")
        if len(self.train) == 0:
            raise DataError(f"{self.name}: no training examples; check where the data came from.")

    def _check(self, what: str, ids: "Tensor | None", names: tuple[str, ...], kind: str) -> None:
        if ids is None:
            raise DataError(f"{self.name}: {kind} are named but there are no {what}; give both.")
        if str(ids.dtype) != "torch.int64":
            raise DataError(f"{self.name}: {what} are {ids.dtype}; give int64.")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(names):
            raise DataError(
                f"{self.name}: {what} run from {int(ids.min())} to {int(ids.max())}, but there are "
                f"{len(names)} {kind}; number them from 0 to {len(names) - 1}."
            )


def rank_in_group(groups: "Tensor") -> "Tensor":
    """For every example ``[n]``, how many of its group come before it."""
    import torch

    rank = torch.empty_like(groups)
    for group in groups.unique():
        members = groups == group
        rank[members] = torch.arange(int(members.sum()))
    return rank
