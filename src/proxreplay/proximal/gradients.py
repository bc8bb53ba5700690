"""Gradients read as matrices ``[groups, out, d]``, multiplied, and written back."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal.linalg import DenseShrinkage, Shrinkage
from proxreplay.proximal.sites import Site


def gradients_of(
    model: nn.Module, site: Site, only: Collection[int] | None = None
) -> list[Tensor | None]:
    """The gradient of every column's parameter; None where it has none or is not to be moved.

    Args:
        model: as `unwrap` gives it.
        site: whose columns.
        only: ids of the parameters that will be moved; None for all.
    """
    parameters = [column.parameter(model) for column in site.columns]
    return [p.grad if only is None or id(p) in only else None for p in parameters]


def moving_columns(site: Site, gradients: Sequence[Tensor | None], width: int) -> Tensor:
    """The columns of ``Lambda`` whose parameter has a gradient."""
    flags = [
        torch.full((columns,), gradient is not None)
        for gradient, columns in zip(gradients, site.widths(width), strict=True)
    ]
    return torch.cat(flags).nonzero()[:, 0]


def multiply_gradients_(
    site: Site, gradients: Sequence[Tensor | None], factor: Shrinkage, width: int
) -> None:
    """``[G_weight | G_biases] <- [G_weight | G_biases] Lambda`` over the gradients that exist.

    To be called where autograd does not record.

    Args:
        site: whose columns.
        gradients: as `gradients_of` gives them.
        factor: restricted to the columns that move.
        width: all columns of the site.
    """
    present = [
        (column.part, gradient, columns)
        for column, gradient, columns in zip(
            site.columns, gradients, site.widths(width), strict=True
        )
        if gradient is not None
    ]
    if any(gradient.is_sparse for _, gradient, _ in present):
        _scale_sparse_(site, present[0][1], factor)
        return
    try:
        matrices = [part.read(g, factor.groups, columns) for part, g, columns in present]
    except RuntimeError as error:
        raise RefreshError(
            f"{site}: its gradient does not fit the {width} columns of the last refresh; refresh "
            "again after the layer has changed."
        ) from error
    if len(present) == 1:  # nothing to join
        present[0][0].write_(present[0][1], _product(matrices[0].to(factor.dtype), factor))
        return
    product = _product(torch.cat([m.to(factor.dtype) for m in matrices], dim=2), factor)
    pieces = product.split([columns for *_, columns in present], dim=2)
    for (part, gradient, _), piece in zip(present, pieces, strict=True):
        part.write_(gradient, piece)


@dataclass(frozen=True)
class Vectors:
    """The gradients of a layer that scales and shifts every channel by itself, as BatchNorm does.

    Args:
        gradients: one a column, each ``[groups]``.
        Lambda: ``[groups, columns, columns]``.
    """

    gradients: tuple[Tensor, ...]
    Lambda: Tensor


def vectors_of(site: Site, gradients: Sequence[Tensor | None], factor: Shrinkage) -> Vectors | None:
    """The gradients as vectors, if that is what all of them are."""
    if not isinstance(factor, DenseShrinkage) or factor.width != len(gradients):
        return None
    present = []
    for column, gradient in zip(site.columns, gradients, strict=True):
        whole = column.part.start == 0 and column.part.stop is None
        if gradient is None or not whole or gradient.is_sparse or gradient.dtype != factor.dtype:
            return None
        if gradient.shape != (factor.groups,):
            return None
        present.append(gradient)
    return Vectors(tuple(present), factor.Lambda)


def multiply_vectors_(layers: Sequence[Vectors]) -> None:
    """``G <- G Lambda`` for all these layers in one product: each by itself is mostly overhead."""
    alike: defaultdict[Hashable, list[Vectors]] = defaultdict(list)
    for one in layers:
        Lambda = one.Lambda
        alike[Lambda.shape[1], Lambda.dtype, Lambda.device].append(one)
    for together in alike.values():
        columns = [
            torch.cat(column) for column in zip(*(v.gradients for v in together), strict=True)
        ]
        joined = torch.stack(columns, dim=1)[:, None]  # [channels of all layers, 1, columns]
        product = _product(joined, DenseShrinkage(torch.cat([v.Lambda for v in together])))
        pieces = product.split([len(v.Lambda) for v in together])
        for one, piece in zip(together, pieces, strict=True):
            for i, gradient in enumerate(one.gradients):
                gradient.copy_(piece[:, 0, i])


def _product(M: Tensor, factor: Shrinkage) -> Tensor:
    """``M Lambda`` in the precision of the factor, also inside of autocast."""
    if not torch.is_autocast_enabled(
        M.device.type
    ):  # entering the context costs as much as a layer
        return factor.apply(M)
    with torch.autocast(M.device.type, enabled=False):
        return factor.apply(M)


def _scale_sparse_(site: Site, gradient: Tensor, factor: Shrinkage) -> None:
    """Scale the rows that a sparse gradient holds; a diagonal ``Lambda`` allows it."""
    if factor.width != 1:
        raise InputError(f"{site} has a sparse gradient; only an Embedding may, use dense ones.")
    values, rows = gradient._values(), gradient._indices()[0]
    one = torch.ones(factor.groups, 1, 1, dtype=factor.dtype, device=values.device)
    values.mul_(factor.apply(one)[rows, :, 0])  # linear, so repeated indices do no harm
