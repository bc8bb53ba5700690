"""Gradients of Linear layers multiplied by their rows, where these are fewer than the outputs.

The gradient of a Linear layer is ``G = D'Z`` with rows ``Z: [k, d]`` and gradients ``D: [k, out]``
at its output. For a batch of ``k`` rows, far fewer than outputs,

    G Lambda = D' (Z Lambda),       L G R = (D L)' (Z R),

so that the product with the factor has ``k`` rows instead of ``out``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from proxreplay.proximal.layers.incoming import (
    Awaited,
    Brought,
    IncomingWatch,
    WatchPlan,
    linear_rows_of,
)
from proxreplay.proximal.rules.layerwise import Treatment
from proxreplay.proximal.rules.length import lengthened
from proxreplay.proximal.shrinkage.forms import DenseShrinkage, Shrinkage
from proxreplay.proximal.shrinkage.rowspace import RowShrinkage
from proxreplay.proximal.shrinkage.twosided import SidesShrinkage

MANY_OUTPUTS = 128  # from here on, both sides by few rows cost less than by as many outputs


def plan_rows(
    model: nn.Module, treatments: Mapping[str, Treatment], *, dense: bool = False
) -> WatchPlan:
    """What to watch: wide Linear layers with few rows, and those with two sides.

    Args:
        model: as `unwrap` gives it.
        treatments: by site.
        dense: whether to watch those with a dense factor too, if they have many outputs.
    """
    sites = [t.site for t in treatments.values() if _is_by_rows(t.factor) or _is_dense(t.factor)]
    found = [
        one
        for one in WatchPlan.of(model, sites).layers
        if isinstance(one[1], nn.Linear)
        and (
            _is_by_rows(treatments[one[0].name].factor)
            or (dense and one[1].out_features >= MANY_OUTPUTS)
        )
    ]
    return WatchPlan(tuple(found), ())


def calls_of(
    watched: Sequence[IncomingWatch], treatments: Mapping[str, Treatment]
) -> dict[str, list[Awaited]]:
    """The calls of a step by site; without sites of which not every call is known."""
    found: dict[str, list[Awaited]] = {}
    for name, treatment in treatments.items():
        calls = [one for watch in watched for one in watch.brought.get(name, ())]
        own = [one for one in calls if isinstance(one, Awaited)]
        lost = len(own) < len(calls) or any(name in watch.lost for watch in watched)
        factor = treatment.factor
        if isinstance(factor, SidesShrinkage):  # a head that has grown is left to others
            lost = lost or any(one.delta.shape[-1] != factor.left.shape[1] for one in own)
        many = any(one.delta.numel() > one.delta.shape[-1] ** 2 for one in own)
        if own and not (lost or many):
            found[name] = own
    return found


def multiply_rows_(call: Awaited, factor: Shrinkage, gradients: Sequence[Tensor | None]) -> None:
    """What one call brought to the gradients, multiplied with the factor; all columns move."""
    if not isinstance(factor, SidesShrinkage):
        subtract_rows_(call, factor, gradients, 1.0)
        return
    Z, D = linear_rows_of(call.x, call.delta, call.incoming, call.site)
    Z = Z.to(factor.dtype)
    both = factor.right.apply(Z[None])[0]
    D = torch.cat([D, (D @ factor.left[0].to(D.dtype)).mul_(factor.gain)])
    add_(gradients, D, torch.cat([Z.neg(), both]), 1.0)


def subtract_rows_(
    call: Awaited,
    factor: Shrinkage,
    gradients: Sequence[Tensor | None],
    share: float,
    *,
    keep: bool = False,
) -> None:
    """``G <- G - s D'Z (I - c Lambda)`` for a Linear layer all of whose columns move.

    Args:
        call: ``D'Z``.
        factor: ``Lambda``.
        gradients: of weight and bias.
        share: ``s``.
        keep: whether ``c`` keeps the length (`length`); else it is 1.
    """
    Z, D = linear_rows_of(call.x, call.delta, call.incoming, call.site)
    Z = Z.to(factor.dtype)
    taken = factor.taken(Z[None])
    if keep:
        taken = lengthened(Brought(Z[None], D[None]), taken)
    add_(gradients, D, taken[0], -share)


def add_(gradients: Sequence[Tensor | None], D: Tensor, Z: Tensor, share: float) -> None:
    """``G <- G + s D'Z`` for a weight and a bias."""
    Z = Z.to(D.dtype)
    for part in gradients:
        assert part is not None
        own = part if part.dtype == D.dtype else part.to(D.dtype)
        if part.ndim == 2:
            own.addmm_(D.T, Z[:, : part.shape[1]], alpha=share)
        else:
            own.addmv_(D.T, Z[:, -1], alpha=share)
        if own is not part:
            part.copy_(own)


def _is_dense(factor: Shrinkage) -> bool:
    return isinstance(factor, DenseShrinkage) and factor.groups == 1


def _is_by_rows(factor: Shrinkage) -> bool:
    if isinstance(factor, SidesShrinkage):
        return isinstance(factor.right, RowShrinkage) or factor.left.shape[1] >= MANY_OUTPUTS
    return isinstance(factor, RowShrinkage)
