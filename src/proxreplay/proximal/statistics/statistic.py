"""What is known of the rows of one site over some examples; no strength enters here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Statistic:
    """Gram matrix, rows and examples of one site."""

    # Z'Z over all rows, [groups, D, D], columns [weight | biases]; added up in float64 where the
    # device has it, and in dtype at least
    G: Tensor
    d: int  # columns of the weight, trained or not
    rows: float  # number of rows per group; no whole number for an average over refreshes
    samples: int  # n, the number of examples
    # precision of the rows, at least float32, and thus of what is made from them
    dtype: torch.dtype
    # how often every row of the weight was picked by an Embedding that shares it with a Linear,
    # [out]; None where there is no such thing
    picked: Tensor | None = None
    # n E[g g'] of the gradients at the outputs, [groups, out, out], where somebody asked for them
    # and they are known
    H: Tensor | None = None

    @property
    def positions(self) -> float:
        """``n_eff``: rows per example."""
        return self.rows / self.samples

    @property
    def diagonal(self) -> Tensor:
        """Of ``G``, ``[groups, D]``."""
        return self.G.diagonal(dim1=1, dim2=2)

    def fits(self, other: Any) -> bool:
        """Whether another statistic is of the same columns."""
        return isinstance(other, Statistic) and self._kind == other._kind

    @property
    def _kind(self) -> tuple[Any, ...]:
        return self.G.shape, self.dtype, None if self.picked is None else self.picked.shape

    def times(self, share: float) -> Self:
        """``share * self`` in memory of its own, in the precision of the rows."""
        return replace(self, G=self.G.to(self.dtype, copy=True)).plus(share, None, 0.0)

    def plus(self, share: float, before: Self | None, stays: float) -> Self:
        """``stays * before + share * self``, in the precision of the rows and the memory of ``G``.

        Large matrices that come and go cost more than their sums.
        """
        G, rows, picked = self.G.to(self.dtype).mul_(share), self.rows * share, self.picked
        if before is None:
            picked = None if picked is None else picked * share
        else:
            G.add_(before.G.to(G.device), alpha=stays)
            rows += before.rows * stays
            if picked is not None and before.picked is not None:
                picked = before.picked.to(G.device) * stays + picked * share
        H = averaged(self.H, share, None if before is None else before.H, stays)
        return replace(self, G=G, rows=rows, picked=picked, H=H)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which `from_state` makes it again."""
        more = {"picked": self.picked, "H": self.H}
        known = {name: value for name, value in more.items() if value is not None}
        return {"G": self.G, "d": self.d, "positions": self.rows, **known}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`, for a statistic per example."""
        G, picked, H = state["G"], state.get("picked"), state.get("H")
        return cls(G, state.get("d", 0), state["positions"], 1, G.dtype, picked, H)


def averaged(new: Tensor | None, share: float, old: Tensor | None, stays: float) -> Tensor | None:
    """``stays old + share new``; outputs that are new had no gradient before."""
    if new is None or old is None:
        return None if new is None else new * share
    return (grown(old, new).to(new.device) * stays).add_(new, alpha=share)


def grown(B: Tensor, like: Tensor) -> Tensor:
    """``B`` with zeros for outputs that are new."""
    more = like.shape[1] - B.shape[1]
    return F.pad(B, (0, more, 0, more)) if more > 0 else B
