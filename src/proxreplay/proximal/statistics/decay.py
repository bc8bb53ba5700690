"""Statistics that age: each refresh sees a part of the memory, and what earlier ones saw fades.

With ``S_t`` the statistic of refresh ``t`` per example and ``r`` how much of the past stays,

    A_t = r A_(t-1) + (1 - r) S_t,      weight_t = r weight_(t-1) + (1 - r),

and ``A_t / weight_t`` takes the place of ``S_t``. The first refresh then counts in full, and no
later one is held back by the zeros that an average starts from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from proxreplay.proximal.statistics.collect import Statistic


@dataclass(frozen=True)
class Aged:
    """What is remembered of the statistics of one site, per example.

    Args:
        G: ``[groups, D, D]``, in the precision of the rows.
        positions: rows an example.
        weight: the sum of the weights of all refreshes.
        picked: as in `Statistic`, per example.
    """

    G: Tensor
    positions: float
    weight: float
    picked: Tensor | None = None

    @classmethod
    def start(cls, new: Statistic) -> Self:
        """Nothing yet, for a site whose statistic looks like this one."""
        G = torch.zeros_like(new.G, dtype=new.dtype)
        return cls(G, 0.0, 0.0, None if new.picked is None else torch.zeros_like(new.picked))

    def fits(self, new: Statistic) -> bool:
        """Whether the site still has these columns."""
        mine = None if self.picked is None else self.picked.shape
        its = None if new.picked is None else new.picked.shape
        return self.G.shape == new.G.shape and self.G.dtype == new.dtype and mine == its

    def followed_by(self, new: Statistic, r: float) -> Self:
        """``r A + (1 - r) S``."""
        share = (1 - r) / new.samples
        device = new.G.device
        G = torch.add(self.G.to(device) * r, new.G.to(self.G.dtype), alpha=share)
        picked = None
        if self.picked is not None and new.picked is not None:
            picked = self.picked.to(device) * r + new.picked * share
        positions = r * self.positions + (1 - r) * new.positions
        return replace(
            self, G=G, positions=positions, weight=r * self.weight + 1 - r, picked=picked
        )

    def statistic(self, like: Statistic) -> Statistic:
        """``A / weight`` in place of a statistic, as if it were of as many examples."""
        times = like.samples / self.weight
        picked = None if self.picked is None else self.picked * times
        return replace(like, G=self.G * times, rows=self.positions * times, picked=picked)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which `from_state` makes it again."""
        picked = {} if self.picked is None else {"picked": self.picked}
        return {"G": self.G, "positions": self.positions, "weight": self.weight, **picked}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`."""
        return cls(state["G"], state["positions"], state["weight"], state.get("picked"))


def aged(before: Aged | None, new: Statistic, r: float) -> Aged:
    """What is remembered of a site after one more refresh.

    Args:
        before: what was until then; a site that has changed its columns starts again.
        new: the statistic of this refresh.
        r: how much of the past stays, in [0, 1).
    """
    if before is None or not before.fits(new):
        before = Aged.start(new)
    return before.followed_by(new, r)
