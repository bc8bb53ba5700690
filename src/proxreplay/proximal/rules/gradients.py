"""Gradients read as matrices ``[groups, out, d]`` and multiplied where they are.

What there is to do depends on which parameters have a gradient and on what that looks like. Both
are the same from step to step, so it is found out once (`plan_products`); a step is then little
more than its products.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal.layers.registry import Part
from proxreplay.proximal.layers.sites import Column, Site
from proxreplay.proximal.shrinkage.forms import DenseShrinkage, Shrinkage


def gradients_of(
    model: nn.Module, columns: Iterable[Column], only: Collection[int] | None = None
) -> list[Tensor | None]:
    """The gradient of every column's parameter; None where it has none or is not to be moved.

    Args:
        model: as `unwrap` gives it.
        columns: of one site or of several.
        only: ids of the parameters that will be moved; None for all.
    """
    parameters = [column.parameter(model) for column in columns]
    if only is None:
        return [p.grad for p in parameters]
    return [p.grad if id(p) in only else None for p in parameters]


def kinds_of(gradients: Sequence[Tensor | None]) -> tuple[Hashable, ...]:
    """Everything about gradients that `plan_products` depends on."""
    return tuple(
        None if one is None else (one.shape, one.dtype, one.device, one.layout) for one in gradients
    )


def moving_columns(site: Site, gradients: Sequence[Tensor | None], width: int) -> Tensor:
    """The columns of ``Lambda`` whose parameter has a gradient."""
    flags = [
        torch.full((columns,), gradient is not None)
        for gradient, columns in zip(gradients, site.widths(width), strict=True)
    ]
    return torch.cat(flags).nonzero()[:, 0]


class Product(Protocol):
    """Something to multiply in every step."""

    def multiply_(self, gradients: Sequence[Tensor | None]) -> None:
        """Change some of the gradients; autograd and autocast are off."""
        ...


@dataclass(frozen=True)
class SiteGradients:
    """Which of all gradients are those of a site, and what to multiply them with.

    Args:
        site: whose columns.
        first: the place of its first column among all gradients.
        factor: restricted to the columns that move.
        width: all columns of the site.
    """

    site: Site
    first: int
    factor: Shrinkage
    width: int


def plan_products(
    sites: Iterable[SiteGradients], gradients: Sequence[Tensor | None]
) -> list[Product]:
    """``[G_weight | G_biases] <- [G_weight | G_biases] Lambda`` over the gradients that exist.

    Args:
        sites: each with at least one gradient.
        gradients: of all columns of all sites.
    """
    products: list[Product] = []
    vectors: defaultdict[Hashable, list[SiteGradients]] = defaultdict(list)
    for one in sites:
        own = gradients[one.first : one.first + len(one.site.columns)]
        if any(gradient is not None and gradient.is_sparse for gradient in own):
            products.append(_scaling(one, own))
        elif isinstance(one.factor, DenseShrinkage) and _are_vectors(one, own):
            Lambda = one.factor.Lambda
            vectors[Lambda.shape[1], Lambda.dtype, Lambda.device].append(one)
        else:
            products.append(_matrix_product(one, own))
    return [*products, *(_vector_product(together) for together in vectors.values())]


@dataclass(frozen=True)
class MatrixProduct:
    """The product of one site.

    Args:
        at: where its gradients are among all.
        parts: how each is read.
        widths: the columns of each.
        factor: ``Lambda``.
    """

    at: tuple[int, ...]
    parts: tuple[Part, ...]
    widths: tuple[int, ...]
    factor: Shrinkage

    def multiply_(self, gradients: Sequence[Tensor | None]) -> None:
        """``[G_weight | G_biases] <- [G_weight | G_biases] Lambda``."""
        own = [_present(gradients[i]) for i in self.at]
        matrices = self.read(own)
        if len(own) == 1 and _same_memory(matrices[0], own[0]):
            self.factor.apply_(matrices[0])
            return
        joined = torch.cat(matrices, dim=2) if len(own) > 1 else matrices[0]
        product = self.factor.apply(joined)
        pieces = product.split(self.widths, dim=2) if len(own) > 1 else (product,)
        for part, gradient, piece in zip(self.parts, own, pieces, strict=True):
            part.write_(gradient, piece)

    def read(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The gradients as matrices in the precision of ``Lambda``."""
        groups, dtype = self.factor.groups, self.factor.dtype
        return [
            part.read(gradient, groups, columns).to(dtype)
            for part, gradient, columns in zip(self.parts, own, self.widths, strict=True)
        ]


@dataclass(frozen=True)
class VectorProduct:
    """The products of layers that scale and shift every channel by itself, as BatchNorm does.

    All of them are one: each by itself would be mostly overhead.

    Args:
        at: for every column, where the gradients of the layers are among all; each ``[channels]``.
        sizes: the channels of every layer.
        Lambda: ``[columns, columns, channels of all layers]``.
    """

    at: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    Lambda: Tensor

    def multiply_(self, gradients: Sequence[Tensor | None]) -> None:
        """``G[c] <- G[c] Lambda[c]`` for every channel ``c``."""
        own = [[_present(gradients[i]) for i in column] for column in self.at]
        G = [torch.cat(column) for column in own]
        for j, column in enumerate(own):
            product = G[0] * self.Lambda[0, j]
            for i in range(1, len(G)):
                product.addcmul_(G[i], self.Lambda[i, j])
            torch._foreach_copy_(column, product.split(self.sizes))


@dataclass(frozen=True)
class SparseScaling:
    """The rows that a sparse gradient holds, scaled; a diagonal ``Lambda`` allows it.

    Args:
        at: where the gradient is among all.
        scale: ``[rows of the weight]``.
    """

    at: int
    scale: Tensor

    def multiply_(self, gradients: Sequence[Tensor | None]) -> None:
        """Linear, so repeated indices do no harm."""
        gradient = _present(gradients[self.at])
        gradient._values().mul_(self.scale[gradient._indices()[0], None])


def _matrix_product(one: SiteGradients, own: Sequence[Tensor | None]) -> MatrixProduct:
    present = [
        (one.first + i, column.part, columns)
        for i, (column, columns) in enumerate(
            zip(one.site.columns, one.site.widths(one.width), strict=True)
        )
        if own[i] is not None
    ]
    at, parts, widths = zip(*present, strict=True)
    product = MatrixProduct(at, parts, widths, one.factor)
    misfit = RefreshError(
        f"{one.site}: its gradient does not fit the {one.width} columns of the last refresh; "
        "refresh again after the layer has changed."
    )
    try:
        read = product.read([gradient for gradient in own if gradient is not None])
    except RuntimeError as error:
        raise misfit from error
    if len({matrix.shape[:2] for matrix in read}) > 1:
        raise misfit
    return product


def _are_vectors(one: SiteGradients, own: Sequence[Tensor | None]) -> bool:
    """Whether every column has a gradient with one number per group."""
    factor = one.factor
    return factor.width == len(own) and all(
        gradient is not None
        and column.part.whole
        and gradient.dtype == factor.dtype
        and gradient.shape == (factor.groups,)
        for column, gradient in zip(one.site.columns, own, strict=True)
    )


def _vector_product(together: Sequence[SiteGradients]) -> VectorProduct:
    columns = len(together[0].site.columns)
    at = tuple(tuple(one.first + i for one in together) for i in range(columns))
    matrices = [one.factor.Lambda for one in together if isinstance(one.factor, DenseShrinkage)]
    Lambda = torch.cat(matrices).permute(1, 2, 0).contiguous()
    return VectorProduct(at, tuple(len(one) for one in matrices), Lambda)


def _scaling(one: SiteGradients, own: Sequence[Tensor | None]) -> SparseScaling:
    factor = one.factor
    if factor.width != 1:
        raise InputError(
            f"{one.site} has a sparse gradient; only an Embedding may, use dense ones."
        )
    device = _present(own[0]).device
    ones = torch.ones(factor.groups, 1, 1, dtype=factor.dtype, device=device)
    return SparseScaling(one.first, factor.apply(ones)[:, 0, 0])


def _same_memory(matrix: Tensor, gradient: Tensor) -> bool:
    """Whether a matrix is a view of the gradient it was read from."""
    return matrix.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()


def _present(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise RuntimeError("a gradient that was planned for is not there.")
    return gradient
