"""A Gram matrix too large to build, described by its leading directions with a known error."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import Rows, widened

MAX_RANK = 1024  # beyond, the eigenvectors cost more than they are worth


@dataclass
class Sketch:
    """Few rows ``B`` in place of many rows ``Z``: ``B'B <= Z'Z <= B'B + dropped I``."""

    B: Tensor  # [groups, m, D], at most 2 rank rows
    rank: int  # rows that are kept when B is compressed
    dropped: Tensor  # the bound on what compression has lost, one number per group, [groups]
    d: int  # columns of the weight, trained or not
    rows: float = 0  # number of rows of Z per group; no whole number for an average over refreshes
    samples: int = 0  # n, the number of examples

    @classmethod
    def empty(cls, groups: int, width: int, d: int, max_dim: int, like: Tensor) -> Self:
        """A sketch whose memory, ``2 rank`` rows, is at most that of a dense ``max_dim`` Gram."""
        rank = cls.rank_for(groups, width, max_dim)
        return cls(like.new_zeros(groups, 0, width), rank, like.new_zeros(groups), d)

    @staticmethod
    def rank_for(groups: int, width: int, max_dim: int) -> int:
        """The rows kept for matrices of that width."""
        return max(1, min(MAX_RANK, width, max_dim**2 // (2 * width * groups)))

    @property
    def positions(self) -> float:
        """``n_eff``: rows per example."""
        return self.rows / self.samples

    def add_(self, Z: Tensor) -> None:
        """Take rows ``[groups, rows, D]``."""
        for piece in Z.split(self.rank, dim=1):
            self.B = torch.cat([self.B, piece], dim=1)
            if self.B.shape[1] > 2 * self.rank:
                self._compress_()

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[groups, m]`` and eigenvectors ``[groups, D, m]`` of ``B'B``.

        They come from the small matrix ``B B' = V S V'`` as ``U = B' V S^-1/2``.
        """
        s, V = torch.linalg.eigh(self.B @ self.B.mT)
        s = s.clamp_min(0)
        smallest = s[:, -1:] * len(s[0]) * torch.finfo(s.dtype).eps
        inverse_root = torch.where(s > smallest, s.clamp_min(smallest).rsqrt(), 0)
        return s, self.B.mT @ (V * inverse_root[:, None])

    def fits(self, other: Any) -> bool:
        """Whether another sketch is of the same columns."""
        return (
            isinstance(other, Sketch)
            and (self.B.shape[::2], self.B.dtype, self.rank)
            == (other.B.shape[::2], other.B.dtype, other.rank)
        )  # fmt: skip

    def times(self, share: float) -> Self:
        """``share * self``."""
        return self.plus(share, None, 0.0)

    def plus(self, share: float, before: Self | None, stays: float) -> Self:
        """A sketch of ``stays * before + share * self``, with the bound on its error."""
        rows, B, dropped = self.rows * share, self.B * share**0.5, self.dropped * share
        if before is None:
            return replace(self, B=B, dropped=dropped, rows=rows)
        sketch = replace(
            self,
            B=before.B.to(B.device) * stays**0.5,
            dropped=before.dropped.to(B.device) * stays + dropped,
            rows=before.rows * stays + rows,
        )
        sketch.add_(B)
        return sketch

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which `from_state` makes it again."""
        numbers = {"d": self.d, "rank": self.rank, "positions": self.rows}
        return {"B": self.B, "dropped": self.dropped, **numbers}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`, for a sketch per example."""
        B, rank, dropped = state["B"], state["rank"], state["dropped"]
        return cls(B, rank, dropped, state["d"], state["positions"], 1)

    def _compress_(self) -> None:
        """Keep the ``rank`` strongest directions; what is left out is at most the next one."""
        s, V = torch.linalg.eigh(self.B @ self.B.mT)
        self.dropped = self.dropped + s[:, -self.rank - 1].clamp_min(0)
        self.B = V[:, :, -self.rank :].mT @ self.B


def dense_pieces(rows: Rows) -> Iterator[Tensor]:
    """``Z`` in float32 at least, piece by piece; patches are built for one example at a time."""
    if isinstance(rows, PatchRows):
        for x in rows.x.split(1):
            yield widened(replace(rows, x=x).dense())
    else:
        yield widened(rows.dense())
