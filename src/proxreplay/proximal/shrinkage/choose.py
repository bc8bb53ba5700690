"""From a statistic and a strength to a shrinkage, in the form that costs least.

Which one that is depends on how many steps there are until the next refresh (`Pace`).
"""

import math

from torch import Tensor

from proxreplay.proximal.shrinkage.forms import DenseShrinkage, Shrinkage, SpectralShrinkage
from proxreplay.proximal.shrinkage.inverse import dense_inverse_, spectral_inverse, tied_inverse
from proxreplay.proximal.shrinkage.rowspace import row_inverse
from proxreplay.proximal.shrinkage.spectral import Pace, follow, leading, most_that_pays
from proxreplay.proximal.statistics.few import FewRows
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic

COLUMNS_PER_DIRECTION = 16  # an eighth of the products of a dense factor, where it is `fixed`
AT_ONCE = 16  # directions: products of other widths take as long as those of the next multiple
SPECTRAL_FROM = 512  # columns; below, a product costs less than finding out how to save it


def shrinkage_of(
    statistic: Statistic | Sketch,
    omega: float,
    *,
    tolerance: float,
    pace: Pace,
    out: int,
    before: Shrinkage | None = None,
    fixed: bool = False,
) -> Shrinkage | str:
    """``(I + omega Z'Z)^-1``, or why there is none.

    Args:
        statistic: of the rows ``Z``; it may be overwritten.
        omega: the strength.
        tolerance: how far ``Lambda`` may be off in the spectral norm; 0 is exact.
        pace: how often refreshes come.
        out: rows of the gradient per group.
        before: the shrinkage of the refresh before, whose directions are followed.
        fixed: whether wide layers keep a fixed share of their directions, whatever the error
            (`leading`), and not as many as the tolerance needs.
    """
    if isinstance(statistic, FewRows):
        return row_inverse(statistic.B, omega)
    if isinstance(statistic, Sketch):
        return _from_sketch(statistic, omega, tolerance)
    G = statistic.G.to(statistic.dtype).contiguous()
    if statistic.picked is not None:
        return tied_inverse(G, statistic.picked.to(G), statistic.d, omega)
    if tolerance > 0 and len(G) == 1 and G.shape[1] >= SPECTRAL_FROM:
        if fixed:
            known = isinstance(before, SpectralShrinkage) and before.width == G.shape[1]
            start = before.followed[0].to(G) if known else None  # type: ignore[union-attr]
            rank = math.ceil(G.shape[1] / COLUMNS_PER_DIRECTION / AT_ONCE) * AT_ONCE
            return leading(G[0], omega, rank, start)
        few = _leading_directions(G[0], omega, tolerance, pace, out, before)
        if few is not None:
            return few
    return DenseShrinkage(dense_inverse_(G, omega))


def _leading_directions(
    G: Tensor, omega: float, tolerance: float, pace: Pace, out: int, before: Shrinkage | None
) -> SpectralShrinkage | None:
    """The directions that matter, if they are few; None for the dense form.

    They are followed from refresh to refresh. Where there are none to follow they are looked for,
    but not at every refresh: it may turn out not to be worth it.
    """
    most = most_that_pays(len(G), out, pace.expected)
    if isinstance(before, SpectralShrinkage) and before.width == len(G):
        if before.rank <= most:
            return follow(G, omega, tolerance, most, before.followed[0].to(G))
    elif pace.time_to_look:
        return follow(G, omega, tolerance, most)
    return None


def _from_sketch(sketch: Sketch, omega: float, tolerance: float) -> SpectralShrinkage | str:
    factor, error = spectral_inverse(*sketch.spectrum(), omega, sketch.dropped, tolerance)
    if error > tolerance:
        return (
            f"d = {factor.width} is more than max_dim, and {sketch.rank} directions describe it to "
            f"{error:.2g} only (tolerance {tolerance}); raise either, or leave it out with exclude."
        )
    return factor
