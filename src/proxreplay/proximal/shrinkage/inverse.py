"""``(I + omega G)^-1`` from a Gram matrix: in its own memory, or from its eigenvectors."""

import torch
from torch import Tensor

from proxreplay.proximal.shrinkage.forms import (
    RowwiseShrinkage,
    SpectralShrinkage,
    rowwise_shrinkage,
)

BY_HALVES = 360  # columns up to which LAPACK inverts as fast as large products do


def dense_inverse_(G: Tensor, omega: float) -> Tensor:
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


def tied_inverse(G: Tensor, picked: Tensor, d: int, omega: float) -> RowwiseShrinkage:
    """``(I + omega (G + picked[v] E))^-1`` for every row ``v`` of a weight.

    A Linear brings ``G``, the same for all rows; an Embedding that shares its weight brings the
    number of times that a row is picked, on the ``d`` columns of the weight (``E``) alone.

    Args:
        G: ``[1, D, D]``.
        picked: ``[out]``.
        d: columns of the weight; those of biases come after.
        omega: the strength.
    """
    one = torch.eye(G.shape[1], dtype=G.dtype, device=G.device)[None]
    E = one.clone()
    E[:, d:] = 0
    return rowwise_shrinkage(one + omega * G, E, omega * picked)


def spectral_inverse(
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
