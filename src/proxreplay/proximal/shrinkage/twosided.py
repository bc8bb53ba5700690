"""Two-sided shrinkages: ``G <- (I + omega B (x) A)^-1 G`` for a gradient ``G: [out, d]``.

``A: [d, d]`` is of a layer's inputs, ``B: [out, out]`` of the gradients at its outputs. With
``A = U diag(a) U'`` and ``B = V diag(b) V'`` it is exactly

    G <- V [ (V' G U)_ij / (1 + omega b_i a_j) ] U'.

Cheaper are two inverses, one on each side (Martens and Grosse 2015): with ``tau = 1 / omega`` and
``pi^2 = (tr A / d) / (tr B / out)``,

    G <- (I + pi / sqrt(tau) B)^-1 G (I + A / (pi sqrt(tau)))^-1,

whose metric exceeds the exact one by ``A / (pi sqrt(tau)) + pi / sqrt(tau) B``: directions that
matter on one side only are shrunk too.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proxreplay.proximal.shrinkage.forms import DenseShrinkage, Shrinkage
from proxreplay.proximal.shrinkage.inverse import dense_inverse_


@dataclass(frozen=True)
class EigenShrinkage(Shrinkage):
    """``gain V [ (V' M U)_ij / (1 + b_i a_j) ] U'``; rows beyond ``V``, which are new, stay.

    Args:
        U: ``[groups, width, width]``, eigenvectors of ``A``.
        a: ``[groups, width]``, its eigenvalues, at least 0.
        V: ``[groups, out, out]``, eigenvectors of ``B``.
        b: ``[groups, out]``, its eigenvalues times ``omega``, at least 0.
        gain: ``[]``, what everything is multiplied with.
    """

    U: Tensor
    a: Tensor
    V: Tensor
    b: Tensor
    gain: Tensor

    def apply(self, M: Tensor) -> Tensor:
        """To eigenvectors of both sides and back."""
        out = self.V.shape[1]
        known = torch.bmm(torch.bmm(self.V.mT, M[:, :out]), self.U)
        known.div_(self.b[:, :, None] * self.a[:, None] + 1)
        changed = torch.bmm(torch.bmm(self.V, known), self.U.mT)
        whole = changed if M.shape[1] == out else torch.cat([changed, M[:, out:]], dim=1)
        return whole * self.gain

    def restricted(self, kept: Tensor) -> "EigenShrinkage":
        """With ``A`` restricted to these columns."""
        kept = kept.to(self.U.device)
        rows = self.U[:, kept]
        a, U = torch.linalg.eigh((rows * self.a[:, None]) @ rows.mT)
        return replace(self, U=U, a=a.clamp_min(0))


@dataclass(frozen=True)
class SidesShrinkage(Shrinkage):
    """``gain (left M) right``; rows beyond ``left``, which are new, are shrunk by ``right`` alone.

    Args:
        left: ``[groups, out, out]``, symmetric, eigenvalues in (0, 1].
        right: a shrinkage of the columns.
        gain: what everything is multiplied with.
    """

    left: Tensor
    right: Shrinkage
    gain: float = 1.0

    @property
    def groups(self) -> int:
        """Number of matrices."""
        return self.right.groups

    @property
    def width(self) -> int:
        """Columns."""
        return self.right.width

    def apply(self, M: Tensor) -> Tensor:
        """Both sides, the narrow one first."""
        M = self._from_left(M)
        self.right.apply_(M)
        return M

    def apply_(self, M: Tensor) -> None:
        """``M <- gain (left M) right``, where the last product can write it in place."""
        if isinstance(self.right, DenseShrinkage) and self.width > 1:
            torch.bmm(self._from_left(M), self.right.Lambda, out=M)
        else:
            M.copy_(self.apply(M))

    def _from_left(self, M: Tensor) -> Tensor:
        """``gain left M`` in memory of its own."""
        out = self.left.shape[1]
        M = M if self.gain == 1 else M * self.gain
        if M.shape[1] > out:
            return torch.cat([torch.bmm(self.left, M[:, :out]), M[:, out:]], dim=1)
        return torch.bmm(self.left, M)

    def restricted(self, kept: Tensor) -> "SidesShrinkage":
        """With the columns' side restricted."""
        return replace(self, right=self.right.restricted(kept))


def exact_shrinkage(A: Tensor, B: Tensor, omega: float, gain: float = 1.0) -> EigenShrinkage:
    """``gain (I + omega B (x) A)^-1`` by the eigenvectors of both.

    Args:
        A: ``[groups, d, d]``.
        B: ``[groups, out, out]``.
        omega: the strength.
        gain: what everything is multiplied with.
    """
    a, U = torch.linalg.eigh(A)
    b, V = torch.linalg.eigh(B.to(A.dtype))
    return EigenShrinkage(U, a.clamp_min(0), V, b.clamp_min(0) * omega, A.new_tensor(gain))


def balance(diagonal: Tensor, B: Tensor) -> float:
    """``pi = sqrt((tr A / d) / (tr B / out))`` over all groups; 1 where either is 0.

    Args:
        diagonal: of ``A``, ``[groups, d]``.
        B: ``[groups, out, out]``.
    """
    a, b = float(diagonal.mean()), mean_eigenvalue(B)
    return (a / b) ** 0.5 if a > 0 and b > 0 else 1.0


def mean_eigenvalue(A: Tensor) -> float:
    """``tr A / d`` over all groups."""
    return float(A.diagonal(dim1=-2, dim2=-1).mean())


def left_shrinkage(B: Tensor, omega: float, dtype: torch.dtype) -> Tensor:
    """``(I + omega B)^-1`` for ``[groups, out, out]``."""
    return dense_inverse_(B.to(dtype).clone(memory_format=torch.contiguous_format), omega)
