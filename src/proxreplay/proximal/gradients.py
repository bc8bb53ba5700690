"""Gradients read as matrices ``[groups, out, d]``, multiplied, and written back."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal.linalg import Shrinkage
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


@torch.no_grad()
def multiply_gradients_(
    site: Site, gradients: Sequence[Tensor | None], factor: Shrinkage, width: int
) -> None:
    """``[G_weight | G_biases] <- [G_weight | G_biases] Lambda`` over the gradients that exist.

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
    with torch.autocast(matrices[0].device.type, enabled=False):
        product = factor.apply(torch.cat([m.to(factor.dtype) for m in matrices], dim=2))
    pieces = product.split([columns for *_, columns in present], dim=2)
    for (part, gradient, _), piece in zip(present, pieces, strict=True):
        part.write_(gradient, piece)


def _scale_sparse_(site: Site, gradient: Tensor, factor: Shrinkage) -> None:
    """Scale the rows that a sparse gradient holds; a diagonal ``Lambda`` allows it."""
    if factor.width != 1:
        raise InputError(f"{site} has a sparse gradient; only an Embedding may, use dense ones.")
    values, rows = gradient._values(), gradient._indices()[0]
    one = torch.ones(factor.groups, 1, 1, dtype=factor.dtype, device=values.device)
    values.mul_(factor.apply(one)[rows, :, 0])  # linear, so repeated indices do no harm
