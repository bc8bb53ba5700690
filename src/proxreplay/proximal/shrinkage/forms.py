"""From a Gram matrix to the shrinkage ``Lambda``; functions of tensors."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BY_HALVES = 360  # columns up to which LAPACK inverts as fast as large products do


class Shrinkage(Protocol):
    """A symmetric ``Lambda: [groups, width, width]`` with eigenvalues in [0, 1], in some form."""

    @property
    def groups(self) -> int:
        """Number of matrices."""
        ...

    @property
    def width(self) -> int:
        """Rows and columns of each."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What gradients are multiplied in."""
        ...

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        ...

    def apply(self, M: Tensor) -> Tensor:
        """``M Lambda`` for ``M: [groups, out, width]``."""
        ...

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``."""
        ...

    def restricted(self, kept: Tensor) -> "Shrinkage":
        """``((Lambda^-1)[kept, kept])^-1``: the shrinkage if only these columns may move."""
        ...

    def to(self, device: torch.device) -> "Shrinkage":
        """The same on another device."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its tensors, from which `shrinkage_from_state` makes it again."""
        ...


@dataclass(frozen=True)
class DenseShrinkage:
    """``Lambda`` as it is.

    Args:
        Lambda: ``[groups, width, width]``.
    """

    Lambda: Tensor

    @property
    def groups(self) -> int:
        """Number of matrices."""
        return self.Lambda.shape[0]

    @property
    def width(self) -> int:
        """Rows and columns of each."""
        return self.Lambda.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """What gradients are multiplied in."""
        return self.Lambda.dtype

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.Lambda.nbytes

    def apply(self, M: Tensor) -> Tensor:
        """``M Lambda``."""
        return M * self.Lambda if self.width == 1 else torch.bmm(M, self.Lambda)

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``."""
        M.copy_(self.apply(M))

    def restricted(self, kept: Tensor) -> "DenseShrinkage":
        """``Lambda_kk - Lambda_kr Lambda_rr^+ Lambda_rk`` with ``r`` the rest.

        The pseudo-inverse serves rules whose ``Lambda`` is a projector.
        """
        kept = kept.to(self.Lambda.device)
        fixed = torch.ones(self.width, dtype=torch.bool, device=kept.device)
        fixed[kept] = False
        rest = fixed.nonzero()[:, 0]
        across = self.Lambda[:, kept][:, :, rest]
        inverse = torch.linalg.pinv(self.Lambda[:, rest][:, :, rest], hermitian=True)
        return DenseShrinkage(self.Lambda[:, kept][:, :, kept] - across @ inverse @ across.mT)

    def to(self, device: torch.device) -> "DenseShrinkage":
        """The same on another device."""
        return DenseShrinkage(self.Lambda.to(device))

    def state(self) -> dict[str, Tensor]:
        """``Lambda``."""
        return {"Lambda": self.Lambda}


@dataclass(frozen=True)
class SpectralShrinkage:
    """``Lambda = scale (I - U diag(f) U')``: the directions that are shrunk more than all others.

    Args:
        U: ``[groups, width, rank]``, orthonormal columns.
        f: ``[groups, rank]``, what each direction loses, in [0, 1].
        scale: what is left of all directions, in (0, 1].
        spare: ``[groups, width, m]``, directions that come next, from which those of a similar
            matrix can be found; they play no part in ``Lambda``.
    """

    U: Tensor
    f: Tensor
    scale: float = 1.0
    spare: Tensor | None = None

    @property
    def groups(self) -> int:
        """Number of matrices."""
        return self.U.shape[0]

    @property
    def width(self) -> int:
        """Rows and columns of each."""
        return self.U.shape[1]

    @property
    def rank(self) -> int:
        """Directions kept."""
        return self.U.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """What gradients are multiplied in."""
        return self.U.dtype

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.U.nbytes + self.f.nbytes + (0 if self.spare is None else self.spare.nbytes)

    @property
    def followed(self) -> Tensor:
        """All directions, ``[groups, width, m + rank]``."""
        return self.U if self.spare is None else torch.cat([self.spare, self.U], dim=2)

    def apply(self, M: Tensor) -> Tensor:
        """``scale (M - (M U) diag(f) U')``."""
        along = torch.bmm(M, self.U).mul_(self.f[:, None])
        return torch.baddbmm(M, along, self.U.mT, beta=self.scale, alpha=-self.scale)

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``, without another matrix of that size."""
        along = torch.bmm(M, self.U).mul_(self.f[:, None])
        M.baddbmm_(along, self.U.mT, beta=self.scale, alpha=-self.scale)

    def restricted(self, kept: Tensor) -> "SpectralShrinkage":
        """``I - V (diag((1 - f) / f) + V'V)^+ V'`` with ``V = U[kept]``, by Woodbury.

        With ``W = V diag(f)^1/2`` it is ``I - W (diag(1 - f) + W'W)^+ W'``, whose inner matrix has
        eigenvalues of at most 2 whatever ``f`` is. It is brought back to orthonormal columns by a
        singular value decomposition.
        """
        W = self.U[:, kept.to(self.U.device)] * self.f.sqrt()[:, None]
        s, Q = torch.linalg.eigh(torch.diag_embed(1 - self.f) + W.mT @ W)
        tolerance = s.shape[-1] * torch.finfo(s.dtype).eps
        root = torch.where(s > tolerance, s.clamp_min(tolerance).rsqrt(), 0)
        half = W @ (Q * root[:, None])
        U, sigma, _ = torch.linalg.svd(half, full_matrices=False)
        return SpectralShrinkage(U, sigma**2, self.scale)

    def to(self, device: torch.device) -> "SpectralShrinkage":
        """The same on another device."""
        spare = None if self.spare is None else self.spare.to(device)
        return SpectralShrinkage(self.U.to(device), self.f.to(device), self.scale, spare)

    def state(self) -> dict[str, Tensor]:
        """``U``, ``f``, the scale, and what is spare."""
        scale = torch.tensor(self.scale, dtype=torch.float64)
        spare = {} if self.spare is None else {"spare": self.spare}
        return {"U": self.U, "f": self.f, "scale": scale, **spare}


@dataclass(frozen=True)
class RowwiseShrinkage:
    """A matrix of its own for every row: ``M[v] -> M[v] T diag(1 / (1 + c[v] b)) T'``.

    It is the inverse of ``A + c[v] B`` where ``T' A T = I`` and ``T' B T = diag(b)``.

    Args:
        T: ``[1, width, width]``.
        b: ``[1, width]``, at least 0.
        c: ``[out]``, at least 0.
    """

    T: Tensor
    b: Tensor
    c: Tensor

    @property
    def groups(self) -> int:
        """Always 1."""
        return 1

    @property
    def width(self) -> int:
        """Columns."""
        return self.T.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """What gradients are multiplied in."""
        return self.T.dtype

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.T.nbytes + self.b.nbytes + self.c.nbytes

    def apply(self, M: Tensor) -> Tensor:
        """Every row times its own matrix."""
        return ((M @ self.T) / (1 + self.c[:, None] * self.b)) @ self.T.mT

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``."""
        M.copy_(self.apply(M))

    def restricted(self, kept: Tensor) -> "RowwiseShrinkage":
        """``A`` and ``B`` restricted to these columns, brought to the same form again."""
        kept = kept.to(self.T.device)
        back = torch.linalg.inv(self.T)
        A, B = back.mT @ back, (back.mT * self.b[:, None]) @ back
        return rowwise_shrinkage(A[:, kept][:, :, kept], B[:, kept][:, :, kept], self.c)

    def to(self, device: torch.device) -> "RowwiseShrinkage":
        """The same on another device."""
        return RowwiseShrinkage(self.T.to(device), self.b.to(device), self.c.to(device))

    def state(self) -> dict[str, Tensor]:
        """``T``, ``b`` and ``c``."""
        return {"T": self.T, "b": self.b, "c": self.c}


def rowwise_shrinkage(A: Tensor, B: Tensor, c: Tensor) -> RowwiseShrinkage:
    """``(A + c[v] B)^-1`` for every ``v``, by one simultaneous diagonalisation.

    With ``A = L L'`` and ``L^-1 B L^-T = Q diag(b) Q'`` it is ``T = L^-T Q``.

    Args:
        A: ``[1, d, d]``, symmetric positive definite.
        B: ``[1, d, d]``, symmetric positive semi-definite.
        c: ``[out]``, at least 0.
    """
    L = torch.linalg.cholesky(A)
    half = torch.linalg.solve_triangular(L, B, upper=False)
    b, Q = torch.linalg.eigh(torch.linalg.solve_triangular(L, half.mT, upper=False))
    T = torch.linalg.solve_triangular(L.mT, Q, upper=True)
    return RowwiseShrinkage(T, b.clamp_min(0), c)


@dataclass(frozen=True)
class RootShrinkage:
    """``Lambda = S S'``: symmetric and positive semi-definite whatever the rounding.

    Args:
        S: ``[groups, width, width]``, any root.
    """

    S: Tensor

    @property
    def groups(self) -> int:
        """Number of matrices."""
        return self.S.shape[0]

    @property
    def width(self) -> int:
        """Rows and columns of each."""
        return self.S.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """What gradients are multiplied in."""
        return self.S.dtype

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.S.nbytes

    def apply(self, M: Tensor) -> Tensor:
        """``(M S) S'``."""
        return M * self.S.square() if self.width == 1 else (M @ self.S) @ self.S.mT

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``."""
        M.copy_(self.apply(M))

    def restricted(self, kept: Tensor) -> DenseShrinkage:
        """As the dense form."""
        return DenseShrinkage(self.S @ self.S.mT).restricted(kept)

    def to(self, device: torch.device) -> "RootShrinkage":
        """The same on another device."""
        return RootShrinkage(self.S.to(device))

    def state(self) -> dict[str, Tensor]:
        """``S``."""
        return {"S": self.S}


def shrinkage_from_state(state: dict[str, Tensor]) -> Shrinkage:
    """Make a shrinkage again from what its ``state()`` gave."""
    if state.keys() == {"Lambda"}:
        return DenseShrinkage(state["Lambda"])
    if state.keys() == {"S"}:
        return RootShrinkage(state["S"])
    if state.keys() == {"T", "b", "c"}:
        return RowwiseShrinkage(state["T"], state["b"], state["c"])
    scale = float(state.get("scale", 1.0))
    return SpectralShrinkage(state["U"], state["f"], scale, state.get("spare"))


def shrinkage_(G: Tensor, omega: float) -> Tensor:
    """``Lambda = (I + omega G)^-1``, in the memory of ``G``.

    The eigenvalues of ``I + omega G`` are at least 1, so this cannot fail on a finite Gram matrix.

    Args:
        G: ``[groups, d, d]``, symmetric positive semi-definite.
        omega: the strength, at least 0.

    Returns:
        ``[groups, d, d]``, symmetric up to rounding, eigenvalues in (0, 1].
    """
    G.mul_(omega).diagonal(dim1=-2, dim2=-1).add_(1.0)
    if G.shape[-1] == 1:
        return G.reciprocal_()
    if len(G) == 1:
        invert_(G[0])
        return G
    return _by_cholesky_(G)


def invert_(P: Tensor) -> None:
    """``P <- P^-1`` for ``P: [d, d]``, symmetric, with no eigenvalue below 1.

    By halves, ``P = [[A, B'], [B, D]]``: with ``X = B A^-1`` and ``S = D - X B'``, none of whose
    eigenvalues is below 1 either,

        P^-1 = [[A^-1 + X' S^-1 X, -X' S^-1], [-S^-1 X, S^-1]].

    That is all large products, which are faster than what LAPACK does with triangles.
    """
    d = len(P)
    if d <= BY_HALVES:
        _by_cholesky_(P)
        return
    half = d // 2
    A, B, D = P[:half, :half], P[half:, :half], P[half:, half:]
    invert_(A)
    X = B @ A
    D.addmm_(X, B.T, alpha=-1)
    invert_(D)
    torch.addmm(B, D, X, beta=0, alpha=-1, out=B)
    A.addmm_(X.T, B, alpha=-1)
    P[:half, half:] = B.T


def _by_cholesky_(P: Tensor) -> Tensor:
    columns = P.mT  # the same matrices, in the order in which LAPACK works in place
    torch.linalg.cholesky(columns, out=columns)
    torch.cholesky_inverse(columns, out=columns)
    return P


def spectral_shrinkage(
    s: Tensor, U: Tensor, omega: float, dropped: Tensor, tolerance: float
) -> tuple[SpectralShrinkage, float]:
    """``Lambda = I - U diag(omega s / (1 + omega s)) U'`` from eigenvalues and vectors of ``Z'Z``.

    If ``Z'Z`` exceeds ``U diag(s) U'`` by at most ``dropped I``, then Lambda is off by at most
    ``omega dropped / (1 + omega dropped)``. Directions are left out as long as the sum of both
    errors stays within the tolerance.

    Args:
        s: ``[groups, m]``, ascending.
        U: ``[groups, d, m]``, orthonormal columns.
        omega: the strength.
        dropped: ``[groups]``.
        tolerance: in the spectral norm.

    Returns:
        The shrinkage and the bound on its error.
    """
    s = s.clamp_min(0)  # rounding leaves null directions slightly below
    f = omega * s / (1 + omega * s)
    lost = float((omega * dropped / (1 + omega * dropped)).max())
    unimportant = (f <= max(0.0, tolerance - lost)).all(dim=0)
    first = int(unimportant.sum())  # ascending, so they come first
    error = lost + (float(f[:, :first].max()) if first else 0.0)
    return SpectralShrinkage(U[:, :, first:].contiguous(), f[:, first:].contiguous()), error
