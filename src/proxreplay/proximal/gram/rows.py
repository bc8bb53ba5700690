"""The rows ``Z: [groups, rows, d]`` of one layer call, without the column of ones of a bias.

Statistics are float32 at least, whatever the precision of the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from proxreplay.proximal.gram.cost import HALVED_FROM

FAR = 8  # standard deviations from 0: a mean beyond that is taken away before squares are summed


class Rows(ABC):
    """Rows in whatever form is cheapest: its shape, its ``Z``, and what it can do better."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""

    @abstractmethod
    def dense(self) -> Tensor:
        """``Z`` itself, ``[groups, rows, d]``."""

    def gram(self) -> Tensor:
        """``Z'Z``, ``[groups, d, d]``."""
        return self_product(widened(self.dense()))

    def total(self) -> Tensor:
        """``Z'1``, the sum over rows, ``[groups, d]``."""
        return widened(self.dense()).sum(dim=1)

    def only(self, keep: Tensor) -> "Rows":
        """Some of the rows: those where ``keep: [rows]`` is True."""
        Z = self.dense()
        return DenseRows(Z[:, keep.to(Z.device)])

    def part(self, start: int, stop: int, of: int) -> "Rows | None":
        """The rows of examples ``start`` to ``stop`` of ``of``; None where nobody can tell.

        Rows are in the order of the examples.
        """
        return None

    @property
    def mass(self) -> float:
        """How many rows they count as: ``1'W1``."""
        return self.shape[1]

    def weighed(self, weights: Sequence[float]) -> "Rows | None":
        """The same rows with ``Z'WZ``, ``Z'W1`` and ``1'W1`` as sums; None where it cannot be done.

        Weights are of the examples, whose rows are as many for each, in that order.
        """
        return None

    def kept(self) -> Self | None:
        """The same in memory of its own, to be joined with others later; None if it cannot."""
        return None

    @property
    def geometry(self) -> Hashable:
        """Rows with the same one can be `joined`."""
        return type(self), self.shape[::2]

    def joined(self, others: Sequence[Self]) -> Self:
        """These rows and those of other calls, as one; only where `kept` gives something."""
        raise NotImplementedError(f"{type(self).__name__} cannot be joined.")

    def state(self) -> dict[str, Any]:
        """Tensors and numbers of rows that are `kept`."""
        raise NotImplementedError(f"{type(self).__name__} has no state.")


@dataclass(frozen=True)
class Roots:
    """Roots of weights ``W``, by which rows are multiplied already."""

    each: Tensor  # [n], of every row, or of every example
    sum: float  # of the weights

    @classmethod
    def of(cls, weights: Sequence[float], like: Tensor, times: int = 1) -> Self:
        """Of some weights, each for so many rows, on the device of a tensor."""
        wide = torch.promote_types(like.dtype, torch.float32)
        each = _roots(tuple(weights), wide, like.device)
        return cls(each if times == 1 else each.repeat_interleave(times), times * sum(weights))

    def joined(self, others: Iterable["Roots | None"]) -> "Roots":
        """Those of rows one after the other, all of which are weighed."""
        all_of = [self, *(one for one in others if one is not None)]
        return Roots(torch.cat([one.each for one in all_of]), sum(one.sum for one in all_of))

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        return {"roots": self.each, "weights": self.sum}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self | None:
        """The inverse of `state`; None for rows that all count alike."""
        return cls(state["roots"], state["weights"]) if "roots" in state else None


@lru_cache(maxsize=64)
def _roots(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One tensor for the same weights of all layers; not to be overwritten."""
    return torch.tensor(weights, dtype=torch.float64).sqrt_().to(device, dtype)


@dataclass(frozen=True)
class DenseRows(Rows):
    """Rows that exist as a tensor. Several maps may read them: sums are worked out once."""

    Z: Tensor  # [groups, rows, d]
    # of the weights, one for each row, with which Z is multiplied; None for 1
    roots: Roots | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""
        groups, rows, d = self.Z.shape
        return groups, rows, d

    def dense(self) -> Tensor:
        """``Z`` itself."""
        return self.Z

    def part(self, start: int, stop: int, of: int) -> "DenseRows | None":
        """The rows of some examples, if each has as many."""
        span = span_of(self.Z.shape[1], start, stop, of)
        return None if span is None else DenseRows(self.Z[:, span])

    @property
    def mass(self) -> float:
        """The sum of the weights."""
        return self.Z.shape[1] if self.roots is None else self.roots.sum

    def weighed(self, weights: Sequence[float]) -> "DenseRows | None":
        """``W^1/2 Z``, if each example has as many rows."""
        count, rest = divmod(self.Z.shape[1], len(weights))
        if rest:
            return None
        roots = Roots.of(weights, self.Z, count)
        return DenseRows(widened(self.Z) * roots.each[:, None], roots)

    def kept(self) -> "DenseRows":
        """A copy; weighed ones are one already."""
        if self.roots is not None:
            return self
        return DenseRows(self.Z.clone(memory_format=torch.contiguous_format))

    @property
    def geometry(self) -> Hashable:
        """Kind, size and precision."""
        return type(self), self.shape[::2], self.Z.dtype, self.roots is None

    def state(self) -> dict[str, Any]:
        """``Z``, and the weights in it."""
        return {"Z": self.Z, **({} if self.roots is None else self.roots.state())}

    def joined(self, others: Sequence["DenseRows"]) -> "DenseRows":
        """One after the other."""
        roots = None if self.roots is None else self.roots.joined(one.roots for one in others)
        return DenseRows(torch.cat([self.Z, *(one.Z for one in others)], dim=1), roots)

    def gram(self) -> Tensor:
        """``Z'Z``; not to be overwritten."""
        return self._gram

    def total(self) -> Tensor:
        """``Z'1``; not to be overwritten."""
        return self._total

    @cached_property
    def _gram(self) -> Tensor:
        return super().gram()

    @cached_property
    def _total(self) -> Tensor:
        return super().total() if self.roots is None else self.roots.each @ self.Z


@dataclass(frozen=True)
class ColumnRows(Rows):
    """Rows of one column per group, ``z = (x - shift) scale``, as normalisation layers have them.

    Nothing is transposed or normalised.
    """

    x: Tensor  # [n, groups, *positions], any memory format; one group for every channel
    shift: Tensor | None = None  # [groups]; None for 0
    scale: Tensor | None = None  # [groups]; None for 1
    roots: Roots | None = None  # of the weights, one for each example; None for 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, 1)``."""
        n, groups, *positions = self.x.shape
        return groups, n * prod(positions), 1

    def dense(self) -> Tensor:
        """``Z`` itself, ``[groups, rows, 1]``."""
        Z = widened(self.x).transpose(0, 1).reshape(self.shape)
        if self.shift is not None:
            Z = Z - self.shift[:, None, None]
        if self.roots is not None:
            Z = Z * self.roots.each.repeat_interleave(Z.shape[1] // len(self.x))[:, None]
        return Z if self.scale is None else Z * self.scale[:, None, None]

    @property
    def mass(self) -> float:
        """The sum of the weights of all rows."""
        n = len(self.x) if self.roots is None else self.roots.sum
        return n * prod(self.x.shape[2:])

    def weighed(self, weights: Sequence[float]) -> "ColumnRows | None":
        """The same with weights that wait for the sums."""
        if len(weights) != len(self.x):
            return None
        return replace(self, roots=Roots.of(weights, self.x))

    def part(self, start: int, stop: int, of: int) -> "ColumnRows | None":
        """The rows of some examples."""
        span = span_of(len(self.x), start, stop, of)
        return None if span is None else replace(self, x=self.x[span])

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
        if self.roots is not None:
            Z = widened(last.reshape(-1, groups))
            Z = Z.clone() if self.shift is None else Z - self.shift
            weights, each = self.roots.each.square(), (len(self.x), -1)
            total = (weights @ Z.view(each)).view(-1, groups).sum(dim=0)
            return total, (weights @ Z.square_().view(each)).view(-1, groups).sum(dim=0)
        if last.is_contiguous():
            M, over = last.reshape(-1, last.shape[-2] if last.ndim > 2 else 1, groups), 0
        else:
            M, over = self.x.reshape(len(self.x), groups, -1), 1
        M = widened(M)
        if self.shift is None:
            mean, variance = _moments(M)
        else:
            mean, variance = _moments_about(M, widened(self.shift).unsqueeze(over))
        sums = torch.stack([mean, variance.addcmul_(mean, mean)]).sum(dim=1 + over)
        total, square = sums.mul_(len(M))
        return total, square


def span_of(count: int, start: int, stop: int, of: int) -> slice | None:
    """Where examples ``start`` to ``stop`` of ``of`` are among ``count`` rows, as many for each."""
    if of == 0 or count % of:
        return None
    return slice(start * count // of, stop * count // of)


def self_product(Z: Tensor) -> Tensor:
    """``Z'Z`` of ``[groups, rows, d]``; a wide one by halves, as three of its quarters tell all."""
    d = Z.shape[-1]
    if d < HALVED_FROM:
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


def widened(x: Tensor) -> Tensor:
    """In float32 at least, as statistics are."""
    wide = x.dtype is torch.float32 or x.dtype is torch.float64
    return x if wide else x.to(torch.promote_types(x.dtype, torch.float32))
