"""``Z'Z`` added up over the calls of a layer, with the column of ones that belongs to a bias."""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from proxreplay.errors import InputError
from proxreplay.proximal.gram.axis import Axis
from proxreplay.proximal.gram.lags import LagPlan, assemble
from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import Rows

_Value = TypeVar("_Value")


class GramSum:
    """Adds up ``Z'Z`` over calls of one layer and puts the matrix together once, at the end.

    What convolutions add is smaller than their Gram matrix. A `GramSum` has the shape, Gram matrix
    and total of all rows it was given, so that `gram_with_bias` takes it like any rows.

    Args:
        dtype: to add up in; None for that of the rows, float32 at least.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._shape: tuple[int, int, int] | None = None
        self._mass = 0.0
        self._rows_dtype: torch.dtype | None = None
        self._energy: Tensor | None = None
        self._gram: Tensor | None = None
        self._total: Tensor | None = None
        self._cells: dict[LagPlan, list[Tensor]] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)`` of all rows so far."""
        return _added(self._shape)

    @property
    def mass(self) -> float:
        """What all rows so far count as."""
        return self._mass

    def add(self, rows: Rows, *, gram: bool = True, total: bool = True) -> Self:
        """Take some more rows, of the same groups and columns as those before.

        ``gram`` and ``total`` say whether ``Z'Z`` and ``Z'1`` will be asked for, as a weight and a
        bias do.
        """
        groups, count, d = rows.shape
        before = self._shape or (groups, 0, d)
        if before[::2] != (groups, d):
            raise InputError(
                f"GramSum: rows of {groups} groups and {d} columns cannot be added to those of "
                f"{before[0]} groups and {before[2]} columns; use one sum for each."
            )
        if gram:
            self._add_gram(rows)
        if total:
            self._total = self._plus(self._total, rows.total())
        self._shape = (groups, before[1] + count, d)
        self._mass += rows.mass
        return self

    def _add_gram(self, rows: Rows) -> None:
        if isinstance(rows, PatchRows) and rows.path != "patches":
            more = rows.cells(rows.path)
            before = self._cells.get(rows.plan, [None] * len(more))
            self._cells[rows.plan] = [self._plus(*two) for two in zip(before, more, strict=True)]
            squares = more[0][:, 0]  # the cell of lag 0, at all places
        else:
            squares = rows.gram()
            self._gram = self._plus(self._gram, squares)
        self._energy = squares.diagonal(dim1=1, dim2=2).sum()

    @property
    def rows_dtype(self) -> torch.dtype:
        """The precision of what the rows added last gave, before it was added up."""
        return _added(self._rows_dtype)

    @property
    def energy(self) -> Tensor:
        """At least ``tr Z'Z`` of the rows added last: finite if they are."""
        return _added(self._energy)

    def gram(self) -> Tensor:
        """``Z'Z`` of all rows, ``[groups, d, d]``.

        Convolutions are put together in the precision of their rows, which is twice as fast and
        adds no error to speak of to that of the products.
        """
        grams = [
            assemble(plan, [part.to(self.rows_dtype) for part in cells])
            for plan, cells in self._cells.items()
        ]
        if self._gram is not None:
            grams.append(self._gram)
        return sum(grams[1:], start=_added(grams[0] if grams else None))

    def total(self) -> Tensor:
        """``Z'1`` of all rows, ``[groups, d]``."""
        if self._total is None:
            raise InputError("GramSum: no totals were added; call add() with total=True.")
        return self._total

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and strings, from which `from_state` makes it again."""
        cells = [
            {"axes": [list(astuple(axis)) for axis in plan.axes], "cells": list(cells)}
            for plan, cells in self._cells.items()
        ]
        tensors = {"gram": self._gram, "total": self._total, "energy": self._energy}
        return {
            "shape": list(self.shape),
            "mass": self._mass,
            "dtype": str(self.rows_dtype).removeprefix("torch."),
            "cells": cells,
            **{name: tensor for name, tensor in tensors.items() if tensor is not None},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], dtype: torch.dtype | None) -> Self:
        """The inverse of `state`, for a sum in ``dtype``."""
        own = cls(dtype)
        groups, rows, d = state["shape"]
        own._shape = (groups, rows, d)
        own._mass = state.get("mass", rows)  # older states have no weights
        own._rows_dtype = getattr(torch, state["dtype"])
        own._gram, own._total = state.get("gram"), state.get("total")
        own._energy = state.get("energy")
        for one in state["cells"]:
            plan = LagPlan(tuple(Axis(*numbers) for numbers in one["axes"]))
            own._cells[plan] = list(one["cells"])
        return own

    def _plus(self, sum: Tensor | None, more: Tensor) -> Tensor:
        self._rows_dtype = more.dtype
        if sum is not None:
            return sum.add_(more)
        dtype = self._dtype if more.device.type != "mps" else None  # which has no float64
        return more.to(dtype or more.dtype, copy=True)


def _added(value: _Value | None) -> _Value:
    """What is there once rows were added."""
    if value is None:
        raise InputError("GramSum: nothing was added yet.")
    return value


def gram_with_bias(rows: Rows | GramSum, *, weight: bool = True, bias: bool = True) -> Tensor:
    """``[Z | 1]'[Z | 1]`` restricted to the columns whose parameter is trained.

    Returns:
        ``[groups, D, D]`` with ``D = d * weight + bias``.
    """
    groups, _, d = rows.shape
    if not bias:
        return rows.gram()
    total = rows.total()
    if not weight:
        return total.new_full((groups, 1, 1), rows.mass)
    G = total.new_empty(groups, d + 1, d + 1)
    G[:, :d, :d] = rows.gram()
    G[:, :d, d] = total
    G[:, d, :d] = total
    G[:, d, d] = rows.mass
    return G
