"""What is known of the rows of one site over some examples; no strength enters here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass
class Statistic:
    """Gram matrix, rows and examples of one site.

    Args:
        G: ``Z'Z`` over all rows, ``[groups, D, D]``, columns ``[weight | biases]``; added up in
            float64 where the device has it, and in ``dtype`` at least.
        d: columns of the weight, trained or not.
        rows: number of rows per group; no whole number for an average over refreshes.
        samples: ``n``, the number of examples.
        dtype: precision of the rows, at least float32, and thus of what is made from them.
        picked: how often every row of the weight was picked by an Embedding that shares it with a
            Linear, ``[out]``; None where there is no such thing.
    """

    G: Tensor
    d: int
    rows: float
    samples: int
    dtype: torch.dtype
    picked: Tensor | None = None

    @property
    def positions(self) -> float:
        """``n_eff``: rows per example."""
        return self.rows / self.samples

    def fits(self, other: Any) -> bool:
        """Whether another statistic is of the same columns."""
        return (
            isinstance(other, Statistic)
            and self.G.shape == other.G.shape
            and self.dtype == other.dtype
            and (self.picked is None) == (other.picked is None)
            and (self.picked is None or self.picked.shape == other.picked.shape)  # type: ignore[union-attr]
        )

    def plus(self, share: float, before: Self | None, stays: float) -> Self:
        """``stays * before + share * self``, in the precision of the rows."""
        G, rows, picked = self.G.to(self.dtype), self.rows * share, self.picked
        if before is None:
            G = G * share
            picked = None if picked is None else picked * share
        else:
            G = torch.add(before.G.to(G.device) * stays, G, alpha=share)
            rows += before.rows * stays
            if picked is not None and before.picked is not None:
                picked = before.picked.to(G.device) * stays + picked * share
        return replace(self, G=G, rows=rows, picked=picked)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which `from_state` makes it again."""
        picked = {} if self.picked is None else {"picked": self.picked}
        return {"G": self.G, "d": self.d, "positions": self.rows, **picked}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`, for a statistic per example."""
        G = state["G"]
        return cls(G, state.get("d", 0), state["positions"], 1, G.dtype, state.get("picked"))
