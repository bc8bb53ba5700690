"""The rows themselves, where they are few against their columns, as in a wide Linear layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic, averaged

WIDE = 512  # columns; below, a Gram matrix costs less than thinking about it
COLUMNS_PER_ROW = 3  # at least; then both the factor and its products cost less than dense ones


def most_rows(width: int) -> int:
    """The largest number of rows of that width that is few; 0 for none."""
    return width // COLUMNS_PER_ROW if width >= WIDE else 0


@dataclass
class FewRows(Sketch):
    """A sketch that has lost nothing: ``B = Z``, with at most ``rank`` rows.

    A moving average keeps the newest rows and makes up for the trace of those it lets go.
    """

    H: Tensor | None = None  # as for `Statistic`

    @classmethod
    def of(cls, Z: Tensor, d: int) -> Self:
        """Of rows ``[1, rows, D]``."""
        return cls(Z, most_rows(Z.shape[2]), Z.new_zeros(1), d, Z.shape[1])

    def plus(self, share: float, before: Self | None, stays: float) -> Self:
        """``stays * before + share * self``, of the newest rows."""
        B, rows = self.B * share**0.5, self.rows * share
        H = averaged(self.H, share, None if before is None else before.H, stays)
        if before is None:
            return replace(self, B=B, rows=rows, H=H)
        B = torch.cat([B, before.B.to(B.device) * stays**0.5], dim=1)
        if B.shape[1] > self.rank:
            newest = B[:, : self.rank]
            all_of, kept = B.square().sum(), newest.square().sum()
            B = newest * torch.where(kept > 0, all_of / kept, 1.0).sqrt()
        return replace(self, B=B, rows=before.rows * stays + rows, H=H)

    @property
    def diagonal(self) -> Tensor:
        """Of ``Z'Z``, ``[1, D]``."""
        return self.B.square().sum(dim=1)

    def dense(self) -> Statistic:
        """The same as a Gram matrix."""
        B = self.B.to(torch.float32 if self.B.device.type == "mps" else torch.float64)
        G = B.mT @ B
        return Statistic(G, self.d, self.rows, self.samples, self.B.dtype, None, self.H)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which `from_state` makes it again."""
        own = {"few": True} | ({} if self.H is None else {"H": self.H})
        return super().state() | own

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`, for rows per example."""
        return replace(super().from_state(state), H=state.get("H"))


def alike(
    one: Statistic | Sketch, other: Statistic | Sketch
) -> tuple[Statistic | Sketch, Statistic | Sketch]:
    """Both as Gram matrices, where one has its rows and the other has not."""
    if isinstance(one, FewRows) and isinstance(other, Statistic):
        return one.dense(), other
    if isinstance(other, FewRows) and isinstance(one, Statistic):
        return one, other.dense()
    return one, other
