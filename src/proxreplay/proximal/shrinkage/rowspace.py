"""``(I + omega Z'Z)^-1`` from few rows ``Z: [n, d]``, ``n < d``, without a ``d x d`` matrix.

By Woodbury's identity, with ``C C' = I + omega Z Z'`` (Cholesky, ``n x n``),

    Lambda = I - W'W,      W = sqrt(omega) C^-1 Z,

exactly, for ``n^2 d`` multiplications where an inverse takes ``d^3``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxreplay.proximal.shrinkage.forms import Shrinkage


@dataclass(frozen=True)
class RowShrinkage(Shrinkage):
    """``Lambda = I - W'W``."""

    Wt: Tensor  # W', [groups, width, n], singular values in [0, 1)

    def apply(self, M: Tensor) -> Tensor:
        """``M - (M W') W``."""
        return torch.baddbmm(M, torch.bmm(M, self.Wt), self.Wt.mT, alpha=-1)

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``, without another matrix of that size."""
        M.baddbmm_(torch.bmm(M, self.Wt), self.Wt.mT, alpha=-1)

    def taken(self, M: Tensor) -> Tensor:
        """``(M W') W``."""
        return torch.bmm(torch.bmm(M, self.Wt), self.Wt.mT)

    def restricted(self, kept: Tensor) -> "RowShrinkage":
        """``omega Z'Z = W' (I - W W')^-1 W`` restricted to these columns, and inverted again."""
        W = self.Wt.mT.double()
        rest = torch.eye(W.shape[1], dtype=W.dtype, device=W.device) - W @ W.mT
        L = torch.linalg.cholesky(rest)
        B = torch.linalg.solve_triangular(L, W[:, :, kept.to(W.device)], upper=False)
        return RowShrinkage(row_inverse(B, 1.0).Wt.to(self.Wt.dtype))


def row_inverse(Z: Tensor, omega: float) -> RowShrinkage:
    """``(I + omega Z'Z)^-1``.

    Args:
        Z: ``[groups, n, d]``.
        omega: the strength, at least 0.
    """
    B = Z.double() * omega**0.5
    P = B @ B.mT
    diagonal = P.diagonal(dim1=-2, dim2=-1)
    rounding = diagonal.amax() * len(P[0]) * torch.finfo(P.dtype).eps  # rows may repeat each other
    diagonal.add_(1 + rounding)
    C = torch.linalg.cholesky(P)
    W = torch.linalg.solve_triangular(C, B, upper=False)
    return RowShrinkage(W.mT.to(Z.dtype).contiguous())
