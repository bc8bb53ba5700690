"""The forms of a shrinkage ``Lambda``: dense, by its directions, per row, by a root."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from proxreplay.errors import InputError


@dataclass(frozen=True)
class Shrinkage(ABC):
    """A symmetric ``Lambda: [groups, width, width]`` with eigenvalues in [0, 1], in some form.

    A form is a frozen dataclass of tensors, numbers and other forms, and is told from the others
    by the names of its fields. The first one is a tensor ``[groups, width, ...]``.
    """

    forms: ClassVar[list[type["Shrinkage"]]] = []  # all that there are

    def __init_subclass__(cls) -> None:
        cls.forms.append(cls)

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """Its tensors and other forms."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in values.items() if isinstance(one, Tensor | Shrinkage)}

    @cached_property
    def _first(self) -> Tensor:
        first: Tensor = getattr(self, fields(self)[0].name)
        return first

    @property
    def groups(self) -> int:
        """Number of matrices."""
        return self._first.shape[0]

    @property
    def width(self) -> int:
        """Rows and columns of each."""
        return self._first.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """What gradients are multiplied in."""
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._first.device

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        parts = self._parts.values()
        return sum(one.nbytes if isinstance(one, Tensor) else one.bytes for one in parts)

    @abstractmethod
    def apply(self, M: Tensor) -> Tensor:
        """``M Lambda`` for ``M: [groups, out, width]``."""

    def apply_(self, M: Tensor) -> None:
        """``M <- M Lambda``."""
        M.copy_(self.apply(M))

    def taken(self, M: Tensor) -> Tensor:
        """``M (I - Lambda)``."""
        return M - self.apply(M)

    @abstractmethod
    def restricted(self, kept: Tensor) -> "Shrinkage":
        """``((Lambda^-1)[kept, kept])^-1``: the shrinkage if only these columns may move."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(self, **{name: one.to(device) for name, one in self._parts.items()})

    def state(self) -> dict[str, Any]:
        """Nested dicts of tensors, from which `shrinkage_from_state` makes it again."""
        numbers = [field.name for field in fields(self) if field.type is float]
        return {
            name: one if isinstance(one, Tensor) else one.state()
            for name, one in self._parts.items()
        } | {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in numbers}


@dataclass(frozen=True)
class DenseShrinkage(Shrinkage):
    """``Lambda`` as it is."""

    Lambda: Tensor  # [groups, width, width]

    def apply(self, M: Tensor) -> Tensor:
        """``M Lambda``."""
        return M * self.Lambda if self.width == 1 else torch.bmm(M, self.Lambda)

    def taken(self, M: Tensor) -> Tensor:
        """``M - M Lambda``, in one go."""
        return (
            M - M * self.Lambda if self.width == 1 else torch.baddbmm(M, M, self.Lambda, alpha=-1)
        )

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


@dataclass(frozen=True)
class SpectralShrinkage(Shrinkage):
    """``Lambda = scale (I - U diag(f) U')``: some directions are shrunk more than all others."""

    U: Tensor  # [groups, width, rank], orthonormal columns
    f: Tensor  # [groups, rank], what each direction loses, in [0, 1]
    scale: float = 1.0  # what is left of all directions, in (0, 1]
    # [groups, width, m], the directions that come next. They play no part in Lambda, but the
    # directions of a similar matrix are found from them.
    spare: Tensor | None = None

    @property
    def rank(self) -> int:
        """Directions kept."""
        return self.U.shape[2]

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

    def taken(self, M: Tensor) -> Tensor:
        """``(1 - scale) M + scale (M U) diag(f) U'``."""
        along = torch.bmm(M, self.U).mul_(self.f[:, None])
        return torch.baddbmm(M, along, self.U.mT, beta=1 - self.scale, alpha=self.scale)

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


@dataclass(frozen=True)
class RowwiseShrinkage(Shrinkage):
    """A matrix of its own for every row: ``M[v] -> M[v] T diag(1 / (1 + c[v] b)) T'``.

    It is the inverse of ``A + c[v] B`` where ``T' A T = I`` and ``T' B T = diag(b)``.
    """

    T: Tensor  # [1, width, width]
    b: Tensor  # [1, width], at least 0
    c: Tensor  # [out], at least 0

    def apply(self, M: Tensor) -> Tensor:
        """Every row times its own matrix."""
        return ((M @ self.T) / (1 + self.c[:, None] * self.b)) @ self.T.mT

    def restricted(self, kept: Tensor) -> "RowwiseShrinkage":
        """``A`` and ``B`` restricted to these columns, brought to the same form again."""
        kept = kept.to(self.T.device)
        back = torch.linalg.inv(self.T)
        A, B = back.mT @ back, (back.mT * self.b[:, None]) @ back
        return rowwise_shrinkage(A[:, kept][:, :, kept], B[:, kept][:, :, kept], self.c)


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
class RootShrinkage(Shrinkage):
    """``Lambda = S S'``: symmetric and positive semi-definite whatever the rounding."""

    S: Tensor  # [groups, width, width], any root

    def apply(self, M: Tensor) -> Tensor:
        """``(M S) S'``."""
        return M * self.S.square() if self.width == 1 else (M @ self.S) @ self.S.mT

    def restricted(self, kept: Tensor) -> DenseShrinkage:
        """As the dense form."""
        return DenseShrinkage(self.S @ self.S.mT).restricted(kept)


def shrinkage_from_state(state: Mapping[str, Any]) -> Shrinkage:
    """Make a shrinkage again from what its ``state()`` gave."""
    for form in Shrinkage.forms:
        types = {field.name: field.type for field in fields(form)}
        if state.keys() <= types.keys():
            values: dict[str, Any] = {
                name: shrinkage_from_state(one) if isinstance(one, Mapping) else one
                for name, one in state.items()
            }
            numbers = {name: float(values[name]) for name in values if types[name] is float}
            return form(**values | numbers)
    raise InputError(f"no form of a shrinkage has the fields {sorted(state)}.")
