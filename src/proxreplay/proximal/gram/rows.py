"""``Z'Z`` for the rows of a layer: the one statistic that the gradient rules are built on.

A `Rows` object stands for ``Z: [groups, rows, d]`` without the bias column. It may build ``Z`` or
avoid that; `gram_with_bias` adds the column of ones that belongs to a bias, and `GramSum` adds up
over many calls. Statistics are float32 at least, whatever the precision of the rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.errors import InputError
from proxreplay.proximal.gram.axis import Axis
from proxreplay.proximal.gram.correlate import correlate_by_shifts, correlate_by_spectrum
from proxreplay.proximal.gram.cost import WIDE, Path, Work, cheapest
from proxreplay.proximal.gram.lags import LagPlan, assemble, lag_cells, spread

FAR = 8  # standard deviations from 0: a mean beyond that is taken away before squares are summed
PATCHES_AT_ONCE = 1 << 24  # elements; more examples than that are unfolded one part after another


class Rows(Protocol):
    """The rows ``Z: [groups, rows, d]`` of one layer call, in whatever form is cheapest."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""
        ...

    def dense(self) -> Tensor:
        """``Z`` itself, ``[groups, rows, d]``."""
        ...

    def gram(self) -> Tensor:
        """``Z'Z``, ``[groups, d, d]``."""
        ...

    def total(self) -> Tensor:
        """``Z'1``, the sum over rows, ``[groups, d]``."""
        ...


@dataclass(frozen=True)
class DenseRows:
    """Rows that exist as a tensor.

    Args:
        Z: ``[groups, rows, d]``.
    """

    Z: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""
        groups, rows, d = self.Z.shape
        return groups, rows, d

    def dense(self) -> Tensor:
        """``Z`` itself."""
        return self.Z

    def gram(self) -> Tensor:
        """``Z'Z``."""
        return self_product(_widened(self.Z))

    def total(self) -> Tensor:
        """``Z'1``."""
        return _widened(self.Z).sum(dim=1)


class SharedRows:
    """Rows that several maps read: Gram matrix and total are worked out once.

    Args:
        rows: whose they are.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.shape = rows.shape
        self._gram: Tensor | None = None
        self._total: Tensor | None = None

    def dense(self) -> Tensor:
        """``Z`` itself."""
        return self.rows.dense()

    def gram(self) -> Tensor:
        """``Z'Z``."""
        if self._gram is None:
            self._gram = self.rows.gram()
        return self._gram

    def total(self) -> Tensor:
        """``Z'1``."""
        if self._total is None:
            self._total = self.rows.total()
        return self._total


@dataclass(frozen=True)
class ColumnRows:
    """Rows of one column a group, ``z = (x - shift) scale``, as normalisation layers have them.

    Nothing is transposed or normalised.

    Args:
        x: ``[n, groups, *positions]``, any memory format; one group for every channel.
        shift: ``[groups]``; None for 0.
        scale: ``[groups]``; None for 1.
    """

    x: Tensor
    shift: Tensor | None = None
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, 1)``."""
        n, groups, *positions = self.x.shape
        return groups, n * prod(positions), 1

    def dense(self) -> Tensor:
        """``Z`` itself, ``[groups, rows, 1]``."""
        Z = _widened(self.x).transpose(0, 1).reshape(self.shape)
        if self.shift is not None:
            Z = Z - self.shift[:, None, None]
        return Z if self.scale is None else Z * self.scale[:, None, None]

    def gram(self) -> Tensor:
        """``Z'Z``, ``[groups, 1, 1]``."""
        _, squares = self._sums
        return (squares if self.scale is None else squares * self.scale**2)[:, None, None]

    def total(self) -> Tensor:
        """``Z'1``, ``[groups, 1]``."""
        total, _ = self._sums
        return (total if self.scale is None else total * self.scale)[:, None]

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """The sums of ``x - shift`` and of its square over all rows, ``[groups]`` each.

        They come from the mean and the variance of the columns of a matrix, as the memory lies: a
        channel is spread over as many of them as keeps their sums short and the kernel busy.
        """
        groups = self.x.shape[1]
        last = self.x.movedim(1, -1)
        if last.is_contiguous():
            M, over = last.reshape(-1, last.shape[-2] if last.ndim > 2 else 1, groups), 0
        else:
            M, over = self.x.reshape(len(self.x), groups, -1), 1
        M = _widened(M)
        if self.shift is None:
            mean, variance = _moments(M)
        else:
            mean, variance = _moments_about(M, _widened(self.shift).unsqueeze(over))
        sums = torch.stack([mean, variance.addcmul_(mean, mean)]).sum(dim=1 + over)
        total, square = sums.mul_(len(M))
        return total, square


@dataclass(frozen=True)
class PatchRows:
    """The patches that a convolution in any number of dimensions multiplies with its kernel.

    Args:
        x: ``[n, channels, *size]``, any memory format.
        kernel: as the layer's, one number a spatial dimension, as are the following.
        stride: as the layer's.
        dilation: as the layer's.
        groups: as the layer's; ``d = prod(kernel) * channels / groups``, in that order.
        padding: zeros ``(before, after)`` that still go around ``x`` in every dimension; an empty
            tuple says that ``x`` is padded already, with whatever values.
    """

    x: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    padding: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""
        n, channels = self.x.shape[:2]
        return self.groups, n * prod(self.positions), channels // self.groups * prod(self.kernel)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The size of the layer's output."""
        padding = self.padding or ((0, 0),) * len(self.kernel)
        return tuple(
            (size + sum(zeros) - dilation * (k - 1) - 1) // stride + 1
            for size, zeros, k, stride, dilation in zip(
                self.x.shape[2:], padding, self.kernel, self.stride, self.dilation, strict=True
            )
        )

    def dense(self) -> Tensor:
        """``Z`` in the order (*kernel, channel) of a weight whose channels come last."""
        windows: Tensor = F.pad(
            self.x, [zeros for pair in reversed(self.padding) for zeros in pair]
        )
        for dim, (k, stride, dilation) in enumerate(
            zip(self.kernel, self.stride, self.dilation, strict=True)
        ):
            windows = windows.unfold(dim + 2, dilation * (k - 1) + 1, stride)[..., ::dilation]
        windows = windows.unflatten(1, (self.groups, -1))  # [n, groups, channels, *out, *kernel]
        windows = windows.movedim(2, -1).transpose(0, 1)  # [groups, n, *out, *kernel, channels]
        return windows.reshape(self.shape)

    @cached_property
    def plan(self) -> LagPlan:
        """The geometry, on which everything but the values depends."""
        padding = self.padding or ((0, 0),) * len(self.kernel)
        before = tuple(zeros for zeros, _ in padding)
        size, kernel, positions = tuple(self.x.shape[2:]), tuple(self.kernel), self.positions
        return _plan(size, before, positions, kernel, tuple(self.stride), tuple(self.dilation))

    @cached_property
    def path(self) -> Path:
        """The way to the Gram matrix that the cost model finds cheapest."""
        n, channels = self.x.shape[:2]
        return _path(self.plan, n, self.groups, channels // self.groups)

    def gram(self) -> Tensor:
        """``Z'Z``."""
        return self.gram_by(self.path)

    def gram_by(self, path: Path) -> Tensor:
        """``Z'Z`` by a way of one's own choice."""
        return self._unfolded() if path == "patches" else assemble(self.plan, self.cells(path))

    def cells(self, path: Path) -> list[Tensor]:
        """The sums of which `assemble` makes the Gram matrix."""
        plan, x = self.plan, _widened(self.x)
        if path == "spectrum":
            X = spread(plan, x, self.groups, [0] * len(plan.moving))
            return lag_cells(plan, X, correlate_by_spectrum)
        X = spread(plan, x, self.groups, [0, *plan.longest[1:]][: len(plan.moving)])
        return lag_cells(plan, X, correlate_by_shifts)

    def total(self) -> Tensor:
        """``Z'1``, which is that of the sum over the examples."""
        summed = _sum_over_examples(_widened(self.x))
        return replace(self, x=summed[None]).dense().sum(dim=1)

    def _unfolded(self) -> Tensor:
        """``Z'Z`` from patches, for some examples at a time."""
        groups, rows, d = self.shape
        n = len(self.x)
        step = max(1, PATCHES_AT_ONCE * n // max(1, groups * rows * d))
        parts = [DenseRows(replace(self, x=x).dense()) for x in self.x.split(step)]
        return sum((part.gram() for part in parts[1:]), start=parts[0].gram())


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
        self._rows_dtype: torch.dtype | None = None
        self._energy: Tensor | None = None
        self._gram: Tensor | None = None
        self._total: Tensor | None = None
        self._cells: dict[LagPlan, list[Tensor]] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)`` of all rows so far."""
        if self._shape is None:
            raise InputError("GramSum: nothing was added yet.")
        return self._shape

    def add(self, rows: Rows, *, gram: bool = True, total: bool = True) -> Self:
        """Take some more rows.

        Args:
            rows: of the same groups and columns as those before.
            gram: whether ``Z'Z`` will be asked for, as a weight does.
            total: whether ``Z'1`` will be asked for, as a bias does.
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
        if self._rows_dtype is None:
            raise InputError("GramSum: nothing was added yet.")
        return self._rows_dtype

    @property
    def energy(self) -> Tensor:
        """At least ``tr Z'Z`` of the rows added last: finite if they are."""
        if self._energy is None:
            raise InputError("GramSum: nothing was added yet.")
        return self._energy

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
        if not grams:
            raise InputError("GramSum: nothing was added yet.")
        return sum(grams[1:], start=grams[0])

    def total(self) -> Tensor:
        """``Z'1`` of all rows, ``[groups, d]``."""
        if self._total is None:
            raise InputError("GramSum: no totals were added; call add() with total=True.")
        return self._total

    def _plus(self, sum: Tensor | None, more: Tensor) -> Tensor:
        self._rows_dtype = more.dtype
        if sum is not None:
            return sum.add_(more)
        dtype = self._dtype if more.device.type != "mps" else None  # which has no float64
        return more.to(dtype or more.dtype, copy=True)


def gram_with_bias(rows: Rows | GramSum, *, weight: bool = True, bias: bool = True) -> Tensor:
    """``[Z | 1]'[Z | 1]`` restricted to the columns whose parameter is trained.

    Args:
        rows: ``Z`` with shape ``[groups, rows, d]``.
        weight: whether the ``d`` weight columns take part.
        bias: whether the column of ones takes part.

    Returns:
        ``[groups, D, D]`` with ``D = d * weight + bias``.
    """
    groups, count, d = rows.shape
    if not bias:
        return rows.gram()
    total = rows.total()
    if not weight:
        return total.new_full((groups, 1, 1), count)
    G = total.new_empty(groups, d + 1, d + 1)
    G[:, :d, :d] = rows.gram()
    G[:, :d, d] = total
    G[:, d, :d] = total
    G[:, d, d] = count
    return G


def self_product(Z: Tensor) -> Tensor:
    """``Z'Z`` of ``[groups, rows, d]``; a wide one by halves, as three of its quarters tell all."""
    d = Z.shape[-1]
    if d < WIDE:
        return Z.mT @ Z
    left, right = Z[..., : d // 2], Z[..., d // 2 :]
    corner = left.mT @ right
    top = torch.cat([self_product(left), corner], dim=-1)
    return torch.cat([top, torch.cat([corner.mT, self_product(right)], dim=-1)], dim=-2)


def _moments_about(M: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ``M - shift`` and the variance over the first of three dimensions.

    The shift is taken from the mean, unless the mean is so far from 0 that rounding would show.
    """
    if M.device.type == "cpu":  # elsewhere, to look at the mean would be to wait for it
        mean, variance = _moments(M)
        if not bool((mean.square() > FAR**2 * variance).any()):
            return mean.sub_(shift), variance
    return _moments(M - shift)


def _moments(M: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance over the first of three dimensions."""
    if M.device.type != "cpu":
        variance, mean = torch.var_mean(M, dim=0, correction=0)
        return mean, variance
    channels_last = M.flatten(1).mT[None, :, :, None]  # as the kernel of BatchNorm wants it
    mean, variance = torch.batch_norm_update_stats(channels_last, None, None, 0.0)
    return mean.view(M.shape[1:]), variance.view(M.shape[1:])


def _widened(x: Tensor) -> Tensor:
    """In float32 at least, as statistics are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_over_examples(x: Tensor) -> Tensor:
    """``[n, channels, *size]`` summed over ``n``, as one product with the memory as it lies.

    Measured: ten times faster than ``x.sum(dim=0)`` where channels come last.
    """
    last = x.movedim(1, -1)
    ones = x.new_ones(1, len(x))
    if last.is_contiguous():
        return (ones @ last.flatten(1)).view(last.shape[1:]).movedim(-1, 0)
    return (ones @ x.flatten(1)).view(x.shape[1:])


@lru_cache(maxsize=1024)
def _plan(*geometry: tuple[int, ...]) -> LagPlan:
    """One object for one geometry, so that what it has worked out is worked out once."""
    return LagPlan(tuple(Axis(*numbers) for numbers in zip(*geometry, strict=True)))


@lru_cache(maxsize=4096)
def _path(plan: LagPlan, n: int, groups: int, channels: int) -> Path:
    return cheapest(Work(plan, n, groups, channels))
