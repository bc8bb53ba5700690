"""The proximal view: LPR, OWM, AOP, GPM and SGP are one update (the paper's Appendix C.1).

A step of size ``eta`` that must not change a layer's response to representative rows ``m`` much,

    argmin_W <G, W> + 1/(2 eta) ||W - W_j||^2 + sum_m omega_m/(2 eta) ||(W - W_j) m||^2
        = W_j - eta G Lambda,       Lambda = (I + sum_m omega_m m m')^-1,

for ``W: [out, d]``. What the methods choose is the rows, their strength, and the loss behind ``G``:

    method  rows m                            omega_m                             loss
    LPR     layer inputs of the memory now    omega_0 / (n n_eff^beta)            with replay
    OWM     batch means of all past batches   1 / alpha, large                    without
    AOP     the same                          1 / alpha_m, alpha_m from the row   without
    GPM     orthonormal basis of the inputs   infinity                            without
    SGP     the same                          f_m / (1 - f_m)                     without

This is the slow, dense form that says what the rules do. Rules themselves never build it.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from proxreplay.errors import InputError


@dataclass(frozen=True)
class ProximalUpdate:
    """The update of one layer by its representative rows.

    Args:
        M: ``[k, d]``, a representative row each.
        omega: ``[k]``, the strength of each, from 0 (no say) to infinity (no change at all).

    >>> one = ProximalUpdate(torch.tensor([[1.0, 0.0]]), torch.tensor([3.0]))
    >>> one.precondition(torch.tensor([[1.0, 1.0]]))
    tensor([[0.2500, 1.0000]])
    """

    M: Tensor
    omega: Tensor

    def __post_init__(self) -> None:
        if self.M.ndim != 2 or self.omega.shape != self.M.shape[:1]:
            raise InputError(
                f"ProximalUpdate: M of shape {list(self.M.shape)} and omega of shape "
                f"{list(self.omega.shape)}; give [k, d] and [k]."
            )
        if not bool((self.omega >= 0).all()):
            raise InputError("ProximalUpdate: omega has values below 0 or NaN; give at least 0.")

    @classmethod
    def lpr(cls, Z: Tensor, omega: float) -> Self:
        """LPR: all rows ``Z: [n n_eff, d]`` of the memory with one strength."""
        return cls(Z, Z.new_full((len(Z),), omega))

    @classmethod
    def owm(cls, R: Tensor, alpha: Tensor) -> Self:
        """OWM and AOP: batch-mean rows ``R: [k, d]``, each with its ``alpha: [k]``."""
        return cls(R, 1 / alpha)

    @classmethod
    def gpm(cls, basis: Tensor) -> Self:
        """GPM: orthonormal ``basis: [k, d]`` that must not be touched."""
        return cls(basis, basis.new_full((len(basis),), float("inf")))

    @classmethod
    def sgp(cls, basis: Tensor, importance: Tensor) -> Self:
        """SGP: orthonormal ``basis: [k, d]``, closed by ``f = importance: [k]`` in [0, 1].

        The strength that closes the share ``f`` of a direction is ``f / (1 - f)``, infinity for 1.
        """
        return cls(basis, importance / (1 - importance))

    def shrinkage(self) -> Tensor:
        """``Lambda: [d, d]``, the limit of the inverse where strengths are infinite.

        With ``A`` the inverse for the finite ones and ``H`` the rows of the others, it is
        ``A - A H' (H A H')^+ H A``.
        """
        hard = self.omega.isinf()
        soft = self.M[~hard]
        identity = torch.eye(self.M.shape[1], dtype=self.M.dtype, device=self.M.device)
        A = torch.linalg.inv(identity + soft.mT @ (self.omega[~hard, None] * soft))
        HA = self.M[hard] @ A
        Lambda: Tensor = A - HA.mT @ torch.linalg.pinv(HA @ self.M[hard].mT, hermitian=True) @ HA
        return Lambda

    def precondition(self, G: Tensor) -> Tensor:
        """``G Lambda`` for a gradient ``[out, d]``."""
        return G @ self.shrinkage()
