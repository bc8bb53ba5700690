"""Statistics as a moving average over refreshes, each of which sees a part of the memory.

With ``S_t`` the statistic of refresh ``t`` per example and ``r`` the decay,

    A_t = r A_(t-1) + (1 - r) S_t,      weight_t = r weight_(t-1) + (1 - r),

and ``A_t / weight_t`` takes the place of ``S_t``, so that the zeros which an average starts from
do not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from proxreplay.proximal.statistics.few import FewRows, alike
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic


@dataclass(frozen=True)
class Aged:
    """The average of the statistics of one site."""

    mean: Statistic | Sketch  # A, per example
    weight: float  # the sum of the weights of all refreshes

    def instead_of(self, newest: Statistic | Sketch) -> Statistic | Sketch:
        """``A / weight`` as a statistic of as many examples as the newest one."""
        whole = self.mean.times(newest.samples / self.weight)
        return replace(whole, samples=newest.samples)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which `from_state` makes it again."""
        return {**self.mean.state(), "weight": self.weight}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`."""
        kind = FewRows if "few" in state else Sketch if "B" in state else Statistic
        return cls(kind.from_state(state), state["weight"])


def decay_for(decay: float, samples: int, of: int | None) -> float:
    """How much of the past stays: less than the decay where these are most examples there are.

    Args:
        decay: ``r``, in [0, 1).
        samples: examples of this refresh.
        of: how many they were drawn from; None for many more.
    """
    return decay if of is None else min(decay, max(0.0, 1 - samples / of))


def aged(before: Aged | None, new: Statistic | Sketch, r: float) -> Aged:
    """The average after one more refresh.

    Args:
        before: the average until then; a site that has changed its columns starts again.
        new: the statistic of this refresh; it may be overwritten.
        r: how much of the past stays, in [0, 1).
    """
    share = (1 - r) / new.samples
    if before is not None:
        new, mean = alike(new, before.mean)
        before = replace(before, mean=mean)
    if before is None or not new.fits(before.mean):
        return Aged(replace(new.plus(share, None, 0.0), samples=1), 1 - r)
    old: Any = before.mean  # of the same kind as the new one
    return Aged(replace(new.plus(share, old, r), samples=1), r * before.weight + 1 - r)
