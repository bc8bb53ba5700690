"""From a Gram matrix to the shrinkage ``Lambda``; pure functions of tensors."""

import torch
from torch import Tensor


def shrinkage(G: Tensor, omega: float) -> Tensor:
    """``Lambda = (I + omega G)^-1`` by Cholesky.

    The eigenvalues of ``I + omega G`` are at least 1, so this cannot fail on a finite Gram matrix.

    Args:
        G: ``[groups, d, d]``, symmetric positive semi-definite.
        omega: the strength, at least 0.

    Returns:
        ``[groups, d, d]``, symmetric, eigenvalues in (0, 1].
    """
    P = G * omega
    P.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return torch.cholesky_inverse(torch.linalg.cholesky(P))
