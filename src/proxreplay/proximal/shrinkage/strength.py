"""How strongly the rows of a layer count: ``omega`` from what is known of its rows.

A strength knows nothing of how a rule uses it, and a statistic nothing of strengths, so any rule
that is made from ``I + omega Z'Z`` can take either kind:

    Strength(omega_0, beta)     omega = omega_0 / (n n_eff^beta)      the paper's two numbers
    RelativeStrength(level)     omega = level r / trace(Z'Z)          no unit, for any layer
"""

from collections.abc import Mapping
from dataclasses import dataclass

from proxreplay.options import Amount, LPROptions, Options
from proxreplay.proximal.layers.selection import Selector
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic


@dataclass(frozen=True)
class Strength(Options, prefix="LPR: "):
    """The paper's two numbers.

    Args:
        omega_0: strength; 0 leaves every gradient as it is.
        beta: how much layers with many positions are spared.
    """

    omega_0: Amount = 1.0
    beta: Amount = 1.0

    @property
    def off(self) -> bool:
        """Whether it leaves every gradient as it is."""
        return self.omega_0 == 0

    def of(self, statistic: Statistic | Sketch, positions: float) -> float:
        """``omega_0 / (n n_eff^beta)`` for the rows of one layer.

        Args:
            statistic: of the rows.
            positions: ``n_eff``.
        """
        return float(self.omega_0 / (statistic.samples * positions**self.beta))


@dataclass(frozen=True)
class RelativeStrength(Options, prefix="LPR: "):
    """A strength in units of the layer's own rows: the mean of ``omega sigma`` is ``level``.

    ``sigma`` are the eigenvalues of ``Z'Z``, of which ``r = min(D, rows)`` may be more than 0, and
    the mean is over these: ``omega = level r / trace(Z'Z)``. Inputs that are twice as large cancel,
    and so do more positions and more examples where rows are no fewer than columns.

    Args:
        level: strength; 0 leaves every gradient as it is.
    """

    level: Amount = LPROptions.level

    @property
    def off(self) -> bool:
        """Whether it leaves every gradient as it is."""
        return self.level == 0

    def of(self, statistic: Statistic | Sketch, positions: float | None = None) -> float:
        """``omega`` for the rows of one layer; 0 where all of them vanish, see `VANISHING`.

        Args:
            statistic: of the rows.
            positions: makes no difference.
        """
        if isinstance(statistic, Sketch):
            total, (groups, _, width) = statistic.B.double().square().sum(), statistic.B.shape
        else:
            total, (groups, width, _) = statistic.diagonal.sum(), statistic.G.shape
        directions = groups * min(width, statistic.rows)
        return self.level * directions / float(total) if total > directions * VANISHING else 0.0


VANISHING = 1e-30  # mean eigenvalue; below, float32 has too few bits left to invert with

AnyStrength = Strength | RelativeStrength
Overrides = Mapping[Selector, AnyStrength]
