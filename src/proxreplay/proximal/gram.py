"""``Z'Z`` for the rows of a layer: the one statistic that the gradient rules are built on.

A `Rows` object stands for ``Z: [groups, rows, d]`` without the bias column. It may build ``Z`` or
avoid that; `gram_with_bias` adds the column of ones that belongs to a bias.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


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
        return self.Z.mT @ self.Z

    def total(self) -> Tensor:
        """``Z'1``."""
        return self.Z.sum(dim=1)


@dataclass(frozen=True)
class PatchRows:
    """The patches that a 2-d convolution multiplies with its kernel.

    Args:
        x: ``[n, channels, height, width]``, already padded.
        kernel: ``(kh, kw)``.
        stride: as the layer's.
        dilation: as the layer's.
        groups: as the layer's; ``d = channels / groups * kh * kw``.
    """

    x: Tensor
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""
        n, channels, *size = self.x.shape
        rows = n
        for length, k, s, dil in zip(size, self.kernel, self.stride, self.dilation, strict=True):
            rows *= (length - dil * (k - 1) - 1) // s + 1
        return self.groups, rows, channels // self.groups * self.kernel[0] * self.kernel[1]

    def dense(self) -> Tensor:
        """``Z`` in the order (channel, row, column) of the flattened weight."""
        groups, _, d = self.shape
        patches = F.unfold(self.x, self.kernel, dilation=self.dilation, stride=self.stride)
        Z = patches.view(len(patches), groups, d, -1)
        return Z.permute(1, 0, 3, 2).reshape(groups, -1, d)

    def gram(self) -> Tensor:
        """``Z'Z``."""
        return DenseRows(self.dense()).gram()

    def total(self) -> Tensor:
        """``Z'1``."""
        return self.dense().sum(dim=1)


def gram_with_bias(rows: Rows, *, weight: bool = True, bias: bool = True) -> Tensor:
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
