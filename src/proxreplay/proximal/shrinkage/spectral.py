"""The directions that matter, from those of the last refresh, and when it pays to look for them.

From ``k`` directions ``Q`` near those that matter, Nystroem's approximation
``G Q (Q' G Q)^-1 Q' G`` gets more out of one product ``G Q`` than a Rayleigh quotient would, and is
never more than ``G``. Its leading eigenvalues and vectors are kept: ``G_k = U diag(s) U'``. So
``E = omega (G - G_k)`` has no eigenvalue below 0, and with ``e`` its largest one,

    0 <= (I + omega G_k)^-1 - (I + omega G)^-1 <= e / (1 + e) (I + omega G_k)^-1.

In the middle of that, ``Lambda = (1 - h) (I - U diag(f) U')`` with ``f = omega s / (1 + omega s)``
is off by at most ``h = e / (1 + e) / 2`` in the spectral norm. ``e`` is found from below, by a few
steps of a block Lanczos iteration.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from proxreplay.proximal.shrinkage.forms import SpectralShrinkage

LOOK_EVERY = 8  # refreshes: to find directions from nothing costs as much as some inverses
MANY = 1_000_000  # steps, as long as nobody knows how many there will be
ROUNDS = 4
SHARE = 0.6  # of the tolerance is for directions left out on purpose, so that few rounds are enough
CERTAIN = 0.8  # of the tolerance is what the estimate of the error must not exceed
PROBES, STEPS = 8, 3  # directions that look for what was left out, and how often they look
SPARE = 0.6  # as many directions again are followed besides those kept, and some more
NEW = 8  # directions in which nobody has looked before, in every round


@dataclass
class Pace:
    """How often refreshes come, by which cheap steps and cheap refreshes are weighed."""

    refreshes: int = 0  # so far
    steps: int = 0  # since the last one
    between: int = MANY  # the same before the last refresh that had any before it
    samples: int = 0  # examples of the last one

    @property
    def expected(self) -> int:
        """Steps until the next refresh."""
        return self.steps or self.between

    @property
    def time_to_look(self) -> bool:
        """Whether this refresh may look where there is nothing to follow."""
        return self.refreshes % LOOK_EVERY == 0

    def refreshed(self, samples: int = 0) -> None:
        """Take note of a refresh."""
        self.refreshes, self.steps, self.between = self.refreshes + 1, 0, self.expected
        self.samples = samples


def follow(
    G: Tensor, omega: float, tolerance: float, most: int, start: Tensor | None = None
) -> SpectralShrinkage | None:
    """``(I + omega G)^-1`` to a tolerance in the spectral norm, by subspace iteration.

    Args:
        G: ``[d, d]``, symmetric positive semi-definite.
        omega: the strength.
        tolerance: on ``Lambda``; met as far as the estimate above can tell.
        most: the largest number of directions that is of use.
        start: ``[d, k]``, orthonormal columns: the directions of a Gram matrix that is not much
            different. None to find them from nothing, if they are not more than a quarter.

    Returns:
        None if the directions are too many, or were not found in a few rounds.
    """
    d = len(G)
    rng = torch.Generator().manual_seed(d)

    def unseen(count: int) -> Tensor:
        """Random directions, the same on every device and in every process."""
        return torch.randn(d, count, generator=rng, dtype=torch.float32).to(G)

    U = G[:, :0] if start is None else start
    count = NEW if start is not None else max(NEW, d // 4)
    for _ in range(ROUNDS):
        count = min(count, d - U.shape[1])
        Q = _joined(U, G @ unseen(count))
        found = _leading(G, Q)
        if found is None:
            return None
        s, U = found
        lost = omega * s / (1 + omega * s)
        first = int((lost <= 2 * SHARE * tolerance).sum())  # ascending, so they come first
        kept = len(s) - first
        if kept > most:
            return None
        if Q.shape[1] - kept < max(PROBES, kept // 5):  # too few to tell what is outside
            count = max(NEW, len(s) // 2)
            continue
        spare = U[:, max(0, len(s) - followed(kept)) : first]
        probes = torch.cat([unseen(PROBES), spare], dim=1)[:, -PROBES:]
        outside = omega * _largest_outside(G, s[first:], U[:, first:], probes)
        half = outside / (1 + outside) / 2
        if half <= CERTAIN * tolerance:
            U, spare = U[:, first:].contiguous(), spare.contiguous()  # as a saved state has them
            return SpectralShrinkage(U[None], lost[None, first:], 1 - half, spare[None])
        count = NEW
    return None


def leading(G: Tensor, omega: float, rank: int, start: Tensor | None = None) -> SpectralShrinkage:
    """``(I + omega G)^-1`` by the leading directions of ``G``, all others alike.

    It is the inverse of ``I + omega (U diag(s) U' + m (I - U U'))``. A gradient has more in the
    directions in which rows have more, so ``m`` is the mean of the other eigenvalues ``e``, each
    weighed by itself: ``m = sum e^2 / sum e``, from ``tr G`` and the sum of all squares of ``G``.
    Its cost is known beforehand, whatever the spectrum is.

    Args:
        G: ``[d, d]``, symmetric positive semi-definite.
        omega: the strength.
        rank: how many directions, less than ``d``.
        start: ``[d, k]``, orthonormal columns to start from, those of a similar matrix; None for
            random ones and a second round.
    """
    d, count = len(G), min(len(G), rank + NEW)
    rng = torch.Generator().manual_seed(d)
    more = count - (0 if start is None else min(start.shape[1], rank))
    R = torch.randn(d, more, generator=rng, dtype=torch.float32).to(G)
    Q = torch.linalg.qr(R).Q if start is None else _joined(start[:, -rank:], R)
    found = None
    for _ in range(2 if start is None else 1):
        found = _leading(G, Q)
        Q = Q if found is None else found[1]
    if found is None or found[0].shape[0] == 0:  # all of G is rounding
        s, U = G.new_zeros(0), G[:, :0]
    else:
        s, U = found[0][-rank:], found[1][:, -rank:]
    rest = _weighed_mean_of_rest(G, s)
    s = s.clamp_min(rest)
    scale = 1 / (1 + omega * rest)
    f = 1 - (1 + omega * rest) / (1 + omega * s)
    return SpectralShrinkage(U.contiguous()[None], f[None], scale)


def _weighed_mean_of_rest(G: Tensor, s: Tensor) -> float:
    """``sum e^2 / sum e`` over the eigenvalues of ``G`` other than the leading ``s``.

    Never less than their plain mean nor more than the least of ``s``: the difference of two sums of
    squares may be all rounding.
    """
    total = max(0.0, float(G.diagonal().sum() - s.sum()))
    if total == 0:
        return 0.0
    norms = torch.linalg.vector_norm(G, dim=1).double()
    squares = norms.square().sum() - s.double().square().sum()
    mean = total / (len(G) - len(s))
    return max(mean, min(float(squares) / total, float(s[0]) if len(s) else math.inf))


def followed(rank: int) -> int:
    """How many directions are followed where ``rank`` were kept."""
    return int((1 + SPARE) * rank) + NEW


def most_that_pays(d: int, out: int, steps: int) -> int:
    """The largest rank for which `pays`, or -1 for none."""
    return bisect_left(range(d), True, key=lambda rank: not pays(d, out, rank, steps)) - 1


def pays(d: int, out: int, rank: int, steps: int) -> bool:
    """Whether following ``rank`` directions costs less than ``Lambda`` itself.

    In operations at the speed of large products, with measured constants: an inverse costs
    ``d^3``, a round with ``k`` directions ``2 d^2 k + 6 d k^2 + 12 k^3 + 150 d^2``. One or two
    rounds are needed.

    Args:
        d: columns.
        out: rows of the gradient.
        rank: directions kept last time.
        steps: from one refresh to the next.
    """
    k = followed(rank)
    refresh = 1.5 * ((2 * k + 150) * d**2 + 6 * d * k**2 + 12 * k**3)
    return refresh + steps * 4 * out * d * rank < d**3 + steps * 2 * out * d**2


def _joined(U: Tensor, R: Tensor) -> Tensor:
    """Orthonormal columns that span those of both; the columns of ``U`` are orthonormal."""
    for _ in range(2):  # what is left of a column may be little but rounding
        R = torch.linalg.qr(R - U @ (U.mT @ R)).Q
    return torch.cat([U, R], dim=1)


def _leading(G: Tensor, Q: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues, ascending, and eigenvectors of Nystroem's approximation ``GQ (Q'GQ)^-1 Q'G``.

    ``G`` is shifted by a little more than its rounding error, and the eigenvalues back.

    Args:
        G: ``[d, d]``.
        Q: ``[d, k]``, orthonormal columns.

    Returns:
        ``[m]`` and ``[d, m]``, without those that are lost in rounding; None if ``Q'GQ`` is too
        far from positive definite.
    """
    eps = torch.finfo(G.dtype).eps
    Y = G @ Q
    H = Q.mT @ Y
    shift = H.diagonal().amax() * (eps * len(G) ** 0.5) + torch.finfo(G.dtype).tiny
    H.diagonal().add_(shift)
    C, failed = torch.linalg.cholesky_ex(H, upper=True)
    if bool(failed):
        return None
    B = torch.linalg.solve_triangular(C, Y.addcmul_(Q, shift), upper=True, left=False)
    squares, V = torch.linalg.eigh(B.mT @ B)
    lost = int((squares <= 100 * eps * squares[-1]).sum())
    squares, V = squares[lost:], V[:, lost:]
    return (squares - shift).clamp_min(0), (B @ V).div_(squares.sqrt())


def _largest_outside(G: Tensor, s: Tensor, U: Tensor, X: Tensor) -> float:
    """The largest eigenvalue of ``E = G - U diag(s) U'``, from below, by block Lanczos steps.

    Args:
        G: ``[d, d]``.
        s: ``[r]``.
        U: ``[d, r]``, orthonormal columns.
        X: ``[d, m]``, columns to start from.
    """
    basis, images = G[:, :0], G[:, :0]
    for _ in range(STEPS):
        for _ in range(2):
            X = torch.linalg.qr(X - basis @ (basis.mT @ X)).Q
        EX = G @ X - U @ (s[:, None] * (U.mT @ X))
        basis, images = torch.cat([basis, X], dim=1), torch.cat([images, EX], dim=1)
        X = EX
    return max(0.0, float(torch.linalg.eigvalsh(basis.mT @ images)[-1]))
