"""The directions that matter, from those of the last refresh, and when it pays to look for them.

With ``U`` the Ritz vectors of ``omega G`` that are kept, ``D = I + diag(s)`` their values and
``P = [[D, E'], [E, C]]`` in the basis of ``U`` and all the rest, replacing ``E`` by 0 and ``C^-1``
by ``scale I`` changes ``Lambda = P^-1`` by

    [[F' S F, -F' S], [-S F, S - scale I]],     F = E D^-1,     S = (C - E D^-1 E')^-1 <= I,

whose norm is at most that of ``[[|F|^2, |F|], [|F|, |S - scale I|]]``.

``|F|`` is known: it is the residual ``omega G U - U diag(s)``, each column over ``1 + s``. What is
left of ``S`` depends on the largest eigenvalue outside of ``U``, which power iterations from the
Ritz vectors that are not kept find from below.
"""

from dataclasses import dataclass
from math import hypot

import torch
from torch import Tensor

from proxreplay.proximal.linalg import SpectralShrinkage

LOOK_EVERY = 8  # refreshes: eigenvectors cost as much as 7 to 9 inverses
MANY = 1_000_000  # steps, as long as nobody knows how many there will be
ROUNDS = 5
SHARE = 0.6  # of the tolerance is for directions left out, so that few rounds are enough
CERTAIN = 0.95  # of the tolerance is what the estimate of the error must not exceed
PROBES = 4  # directions that look for what was left out
SPARE = 1.3  # times as many directions as before are followed, and 8 more


@dataclass
class Pace:
    """How often refreshes come, by which cheap steps and cheap refreshes are weighed.

    Args:
        refreshes: so far.
        steps: since the last one.
        between: the same before the last refresh that had any before it.
    """

    refreshes: int = 0
    steps: int = 0
    between: int = MANY

    @property
    def expected(self) -> int:
        """Steps until the next refresh."""
        return self.steps or self.between

    @property
    def time_to_look(self) -> bool:
        """Whether this refresh may spend eigenvectors on finding out."""
        return self.refreshes % LOOK_EVERY == 0

    def refreshed(self) -> None:
        """Take note of a refresh."""
        self.refreshes, self.steps, self.between = self.refreshes + 1, 0, self.expected


def follow(G: Tensor, omega: float, tolerance: float, U: Tensor) -> SpectralShrinkage | None:
    """``(I + omega G)^-1`` to a tolerance in the spectral norm, by subspace iteration.

    Args:
        G: ``[d, d]``, symmetric positive semi-definite.
        omega: the strength.
        tolerance: on ``Lambda``; met as far as the estimate above can tell.
        U: ``[d, r]``, the directions of a Gram matrix that is not much different.

    Returns:
        None if five rounds are not enough, or fewer than half of the directions.
    """
    d, r = U.shape
    rng = torch.Generator().manual_seed(d)

    def unseen(count: int) -> Tensor:
        """Random directions, the same on every device and in every process."""
        return torch.randn(d, count, generator=rng, dtype=torch.float32).div_(d**0.5).to(G)

    Q = G @ torch.cat([U, unseen(min(d, followed(r)) - r)], dim=1)
    for _ in range(ROUNDS):
        Q = torch.linalg.qr(Q).Q
        GQ = G @ Q
        s, V = torch.linalg.eigh(Q.mT @ GQ)
        s = (omega * s).clamp_min(0)
        lost = s / (1 + s)
        first = int((lost <= 2 * SHARE * tolerance).sum())  # ascending, so they come first
        images = GQ @ V
        kept = len(s) - first
        if 2 * kept >= d:
            return None
        if first < max(8, kept // 5):  # too few to tell what is outside
            more = min(d - len(s), len(s) // 2)
            Q = torch.cat([images, G @ unseen(more)], dim=1)
            continue
        directions = Q @ V[:, first:]
        residual = (omega * images[:, first:] - directions * s[first:]) / (1 + s[first:])
        outside = omega * _largest_outside(G, directions, images[:, :first])
        half = outside / (1 + outside) / 2
        if _norm_by_blocks(_norm(residual), half) <= CERTAIN * tolerance:
            relative = (1 - (1 - lost[first:]) / (1 - half)).clamp(0, 1)
            return SpectralShrinkage(directions[None], relative[None], 1 - half)
        Q = images
    return None


def followed(rank: int) -> int:
    """How many directions are followed where ``rank`` were kept."""
    return int(SPARE * rank) + 8


def pays(d: int, out: int, rank: int, steps: int) -> bool:
    """Whether following ``rank`` directions costs less than ``Lambda`` itself.

    In operations at the speed of large products, with measured constants: an inverse costs
    ``d^3``, a round ``2 d^2 k + 20 d k^2 + 9 k^3`` for the ``k`` directions followed.

    Args:
        d: columns.
        out: rows of the gradient.
        rank: directions kept last time.
        steps: from one refresh to the next.
    """
    k = followed(rank)
    refresh = 4 * d**2 * k + 20 * d * k**2 + 9 * k**3
    return refresh + steps * 4 * out * d * rank < d**3 + steps * 2 * out * d**2


def _largest_outside(G: Tensor, U: Tensor, images: Tensor) -> float:
    """The largest eigenvalue of ``G`` outside of ``U``, from below, by a few power iterations.

    Args:
        G: ``[d, d]``.
        U: ``[d, r]``, orthonormal columns.
        images: ``[d, m]``, what ``G`` makes of orthonormal columns, orthogonal to ``U``.
    """
    _, V = torch.linalg.eigh(images.mT @ images)
    for _ in range(2):
        X = torch.linalg.qr(images @ V[:, -PROBES:]).Q
        GX = G @ X
        images = GX - U @ (U.mT @ GX)
        _, V = torch.linalg.eigh(images.mT @ images)
    return _norm(images)


def _norm_by_blocks(f: float, rest: float) -> float:
    """The largest eigenvalue of ``[[f^2, f], [f, rest]]``."""
    return (f**2 + rest) / 2 + hypot((f**2 - rest) / 2, f)


def _norm(A: Tensor) -> float:
    """The largest singular value of a matrix with few columns."""
    if A.shape[1] == 0:
        return 0.0
    return float(torch.linalg.eigvalsh(A.mT @ A)[-1].clamp_min(0).sqrt())
