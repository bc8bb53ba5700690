"""Gradients that are turned and not shortened: their length is that of before.

To shrink a gradient does two things. It turns the step away from the directions that remembered
examples use, and it makes it shorter. The first protects; the second is a smaller learning rate,
and a loss wherever a network has not learned enough yet. With

    c = |G| / |G Lambda|,      G <- c G Lambda,

over the weight and bias of a layer, only the first is left.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from proxreplay.proximal.layers.incoming import Brought
from proxreplay.proximal.layers.sites import Site

MOST = 10.0  # times longer: what is hardly there any more is rounding and noise


def lengthening(before: Tensor, after: Tensor) -> Tensor:
    """``c`` from squared lengths; 1 where nothing is left.

    >>> lengthening(torch.tensor([4.0, 1.0, 0.0]), torch.tensor([1.0, 1e-9, 0.0])).tolist()
    [2.0, 10.0, 1.0]
    """
    return (before / after).nan_to_num_(1.0).clamp_(1.0, MOST**2).sqrt_()


def lengthened(brought: Brought, taken: Tensor) -> Tensor:
    """``M - c M Lambda`` for ``G_in = left' M``, as long as that is.

    Args:
        brought: ``G_in``.
        taken: ``M (I - Lambda)``.
    """
    rest = brought.M - taken
    c = lengthening(*brought.squares(brought.M, rest))
    return torch.addcmul(brought.M, rest, c, value=-1)


class Lengths:
    """How long the gradients of some layers are, to make them so again after they were turned.

    Args:
        layers: sites with the gradients of their columns; None where they do not move. Sparse ones
            are left out.
    """

    def __init__(self, layers: Iterable[tuple[Site, Sequence[Tensor | None]]]) -> None:
        self._gradients: list[Tensor] = []
        self._layer: list[int] = []  # of each
        for i, (site, gradients) in enumerate(layers):
            for column, one in zip(site.columns, gradients, strict=True):
                if one is not None and not one.is_sparse:
                    part = column.part
                    self._gradients.append(one if part.whole else one[part.start : part.stop])
                    self._layer.append(i)
        self._before = self._squares() if self._gradients else None

    def _squares(self) -> Tensor:
        """``[layers]``, of weight and bias together."""
        norms = torch._foreach_norm(self._gradients)
        each = torch.stack([one.to(norms[0].device) for one in norms]).square()
        at = torch.tensor(self._layer, device=each.device)
        return each.new_zeros(self._layer[-1] + 1).index_add_(0, at, each)

    @torch.no_grad()
    def restore_(self) -> None:
        """``G <- c G``."""
        if self._before is not None:
            c = lengthening(self._before, self._squares())
            for one, i in zip(self._gradients, self._layer, strict=True):
                one.mul_(c[i].to(one.device))
