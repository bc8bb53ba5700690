"""Rows of tensors in dense slots: what a memory keeps its examples in."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.batch import WEIGHT, is_input
from proxreplay.errors import InputError

Ids = Sequence[int]
Fields = Mapping[str, Tensor]  # by field, [n, ...]
FIRST_ROWS = 256  # allocated at first; afterwards half as many again as there are


class Storage:
    """Rows of named tensors, each known by an id, in slots ``0 .. len-1`` without gaps.

    The tensors grow in chunks and never beyond a limit. What leaves is overwritten: no byte of a
    row outlives it here, neither in a slot nor behind the last one. The last size of a floating
    field other than inputs may change from batch to batch; what is missing is NaN. The field
    ``weight`` may come later than others, and is 1 where it is missing.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}  # each [allocated rows, ...]
        self.ids: list[int] = []  # of every slot
        self.slots: dict[int, int] = {}  # of every id

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fields(self) -> Fields:
        """What is stored of every row."""
        return self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def row_nbytes(self, rows: Fields) -> int:
        """Bytes of one row once ``rows`` are stored beside what is there."""
        return sum(
            row.element_size() * math.prod(self._shape(name, row)) for name, row in rows.items()
        )

    def checked(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows that will be stored; an `InputError` unless they fit what is there."""
        fields = self.fields
        if not fields:
            return rows
        if WEIGHT in fields and WEIGHT not in rows:
            ones = fields[WEIGHT].new_ones(len(rows["labels"]))
            rows = {**rows, WEIGHT: ones}
        if rows.keys() - {WEIGHT} != fields.keys() - {WEIGHT}:
            raise InputError(
                f"memory: a batch with the fields {sorted(rows)} but {sorted(fields)} are "
                "stored; give every batch the same extras, or start a new memory."
            )
        for name, row in rows.items():
            stored = fields.get(name, row)
            if row.dtype != stored.dtype:
                raise InputError(
                    f"memory: {name} of dtype {row.dtype} but {stored.dtype} is stored; convert "
                    "the batch, or start a new memory."
                )
            fixed = -1 if _is_elastic(name, row) else None
            if row.ndim != stored.ndim or row.shape[1:fixed] != stored.shape[1:fixed]:
                raise InputError(
                    f"memory: {name} of shape {tuple(row.shape[1:])} per example but "
                    f"{tuple(stored.shape[1:])} is stored; only the last size of a floating extra "
                    "may change."
                )
        return rows

    def exchange(
        self, gone: Ids, ids: Ids = (), rows: Fields | None = None, limit: int | None = None
    ) -> None:
        """Let the rows ``gone`` go and store others under ``ids``, with one write per field.

        At most ``limit`` rows are allocated; None for no limit.
        """
        before, after = len(self), len(self) - len(gone) + len(ids)
        holes = [self.slots.pop(i) for i in gone]
        free = [hole for hole in holes if hole < after] + list(range(before, after))
        targets, vacant = free[: len(ids)], free[len(ids) :]
        if after < before:
            stay = sorted(set(range(after, before)).difference(holes))
            self._move(stay, vacant)
            for tensor in self.tensors.values():
                tensor[after:before].zero_()
            del self.ids[after:]
        if rows:
            self._reserve(after, rows, limit)
            self._write(targets, ids, rows)

    def gather(
        self, slots: Tensor | slice, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Copies of the rows in some slots; of some fields, or of all for None."""
        some = {n: one for n, one in self.tensors.items() if names is None or n in names}
        if isinstance(slots, slice):
            return {name: tensor[slots].clone() for name, tensor in some.items()}
        index = slots.to(self.device)
        return {name: tensor.index_select(0, index) for name, tensor in some.items()}

    def everything(self) -> dict[str, Tensor]:
        """Copies of all rows."""
        return self.gather(slice(0, len(self)))

    def to(self, device: torch.device) -> None:
        """Move all rows to another device."""
        self.device = device
        for name, tensor in self.tensors.items():
            self._replace(name, tensor.to(device))

    def _shape(self, name: str, row: Tensor) -> tuple[int, ...]:
        """The shape of one row of a field that holds both what is there and ``row``."""
        shape = tuple(row.shape[1:])
        if name in self.fields and _is_elastic(name, row):
            return (*shape[:-1], max(shape[-1], self.fields[name].shape[-1]))
        return shape

    def _reserve(self, size: int, rows: Fields, limit: int | None) -> None:
        """Make room for ``size`` rows as wide as ``rows``; new room is zero, new columns NaN."""
        for name, row in rows.items():
            if self.device is None:
                self.device = row.device
            old = self.tensors.get(name)
            allocated = 0 if old is None else len(old)
            if size > allocated:
                allocated = max(size, FIRST_ROWS, allocated + allocated // 2)
            if limit is not None:
                allocated = min(allocated, limit)
            shape = (allocated, *self._shape(name, row))
            if old is None:
                self.tensors[name] = row.new_zeros(shape, device=self.device)
                if name == WEIGHT:  # of those that came without one
                    self.tensors[name][: len(self)] = 1
            elif old.shape != shape:
                new = old.new_zeros(shape)
                kept = min(len(old), allocated)
                new[:kept] = _pad(old[:kept], shape[-1])
                self._replace(name, new)

    def _replace(self, name: str, new: Tensor) -> None:
        """Put another tensor in the place of a field's; the bytes of the old one are cleared."""
        old, self.tensors[name] = self.tensors[name], new
        if old is not new:
            old.zero_()

    def _move(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for tensor in self.tensors.values():
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        for old, new in zip(sources, targets, strict=True):
            self.ids[new] = self.ids[old]
            self.slots[self.ids[new]] = new

    def _write(self, targets: list[int], ids: Ids, rows: Fields) -> None:
        index = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for name, row in rows.items():
            tensor = self.tensors[name]
            tensor.index_copy_(0, index, _pad(row, tensor.shape[-1]).to(self.device))
        self.ids.extend([-1] * (1 + max(targets, default=-1) - len(self.ids)))
        for slot, identity in zip(targets, ids, strict=True):
            self.ids[slot] = identity
            self.slots[identity] = slot


def _is_elastic(name: str, row: Tensor) -> bool:
    """Whether the last size of a field may change."""
    return not is_input(name) and row.ndim > 1 and row.is_floating_point()


def _pad(rows: Tensor, width: int) -> Tensor:
    """Rows with NaN columns up to a width."""
    missing = width - rows.shape[-1] if rows.ndim > 1 else 0
    return F.pad(rows, (0, missing), value=math.nan) if missing else rows
