"""``Z'Z`` of a convolution from the lagged products of its input, without building the patches.

In one dimension two taps of a kernel with shifts ``s`` and ``t`` see ``x[p]`` and ``x[p + lag]``
with ``lag = t - s``, for ``p`` in the window ``s <= p < s + positions``. So for channels ``c, c'``

    Gram[(c, s), (c', t)] = sum_{all p} x_c[p] x_c'[p + lag]  -  the same over p outside the window,

where the first sum depends on the lag alone and the second has few terms (`Axis.slabs`), none at
all for most pairs where the padding is zero. In several dimensions each contributes its lag or its
slabs, so that taking away edges and putting back corners is a product over dimensions. A stride
becomes 1 by cutting ``x`` into interleaved phases, each a channel of its own. As
``R[-lag] = R[lag]'``, half of the lags is enough. Everything is exact up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, product
from math import prod

import torch
from torch import Tensor

from proxreplay.proximal.gram.axis import Axis, Lags, Slab
from proxreplay.proximal.gram.scratch import scratch

Correlate = Callable[[Tensor, Sequence[Lags]], Tensor]

_ALL = slice(None)


@dataclass(frozen=True)
class LagPlan:
    """How the Gram matrix of a convolution is put together from lagged products.

    A *cell* is a product ``A'B`` of the input with itself: in every dimension either over all
    places at one lag, or at one slab. Cells are sums over examples, so they can be added up over
    batches before `assemble` makes the Gram matrix of them.
    """

    axes: tuple[Axis, ...]  # the dimensions

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """The dimensions in which patches overlap; places of the others are rows."""
        return tuple(i for i, axis in enumerate(self.axes) if not axis.flat)

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """The other dimensions."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.flat)

    @cached_property
    def longest(self) -> Lags:
        """The largest lag in every moving dimension."""
        return tuple(self.axes[i].lags[-1] for i in self.moving)

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """The number of phases of every dimension."""
        return tuple(axis.phases for axis in self.axes)

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """The sets of dimensions that can be at a slab at the same time."""
        slabbed = [i for i in self.moving if self.axes[i].slabs]
        sizes = range(1, len(slabbed) + 1)
        return tuple(chain.from_iterable(combinations(slabbed, size) for size in sizes))

    def rest(self, edge: Sequence[int]) -> list[int]:
        """The moving dimensions that are not at a slab."""
        return [i for i in self.moving if i not in edge]

    def half(self, dims: Sequence[int]) -> list[Lags]:
        """The lags in some dimensions whose first that is not 0 is positive, and 0 itself."""
        zero = (0,) * len(dims)
        return [lags for lags in product(*(self.axes[i].lags for i in dims)) if lags >= zero]

    @cached_property
    def table(self) -> Tensor:
        """For every combination of atoms its cell; beyond the last cell come the transposes."""
        number = {atoms: i for i, atoms in enumerate(self._atoms_of_cells())}
        entries = []
        for atoms in product(*(range(len(axis.atoms)) for axis in self.axes)):
            turned = tuple(axis.mirror[atom] for axis, atom in zip(self.axes, atoms, strict=True))
            entries.append(number[atoms] if atoms in number else len(number) + number[turned])
        return torch.tensor(entries)

    def _atoms_of_cells(self) -> Iterator[tuple[int, ...]]:
        """The atoms of every cell in the order of `lag_cells`."""
        for edge in ((), *self.edges):
            rest = self.rest(edge)
            for lags in self.half(rest):
                for slabs in product(*(self.axes[i].slabs for i in edge)):
                    here: dict[int, int | Slab] = dict(zip(rest, lags, strict=True))
                    here |= zip(edge, slabs, strict=True)
                    yield tuple(axis.atoms[here.get(i, 0)] for i, axis in enumerate(self.axes))


def spread(plan: LagPlan, x: Tensor, groups: int, margins: Sequence[int]) -> Tensor:
    """The input as ``[groups, *lengths, rows, channels]``, with phases as channels.

    ``x`` is ``[n, channels, *size]`` in any memory format; ``margins`` are the zeros to leave after
    every moving dimension.
    """
    order = (*plan.moving, *plan.flat)
    moving = len(plan.moving)
    by_group = x.unflatten(1, (groups, -1))
    n, _, channels = by_group.shape[:3]
    dims = [i + 3 for i in order]
    source = by_group.permute(1, *dims[:moving], 0, *dims[moving:], 2)
    margins = (*margins, *(0 for _ in plan.flat))
    lengths = [plan.axes[i].length + more for i, more in zip(order, margins, strict=True)]
    spans = [length for axis in plan.axes for _, length in axis.spans]
    full = not any(margins) and spans == [a.length for a in plan.axes for _ in a.spans]
    shape = (groups, *lengths[:moving], n, *lengths[moving:], *plan.phases, channels)
    out = scratch("spread", shape, x)
    if not full:
        out.zero_()
    for phases in product(*(range(count) for count in plan.phases)):
        of, to = [], []
        for i in order:
            start, length = plan.axes[i].spans[phases[i]]
            stride = plan.axes[i].stride
            of.append(slice(start, start + stride * length, stride))
            to.append(slice(0, length))
        part = source[(_ALL, *of[:moving], _ALL, *of[moving:])]
        index: list[int | slice] = [_ALL, *to[:moving], _ALL, *to[moving:], *phases]
        out[tuple(index)] = part
    rows, width = n * prod(lengths[moving:]), prod(plan.phases) * channels
    return out.view(groups, *lengths[:moving], rows, width)


def lag_cells(plan: LagPlan, X: Tensor, correlate: Correlate) -> list[Tensor]:
    """All cells, in parts of ``[groups, cells, channels, channels]``: all places, then each edge.

    ``X`` is from `spread`; ``correlate`` computes the cells that are over all places.
    """
    parts = [correlate(X, plan.half(plan.moving))]
    return parts + [_edge_cells(plan, X, edge) for edge in plan.edges]


def assemble(plan: LagPlan, cells: Sequence[Tensor]) -> Tensor:
    """The Gram matrix ``[groups, d, d]`` from (sums of) cells, columns ``(*kernel, channel)``."""
    groups, _, channels, _ = cells[0].shape
    dims = len(plan.axes)
    c = channels // prod(plan.phases)
    both = torch.cat([*cells, *(part.mT for part in cells)], dim=1)
    G = both.index_select(1, plan.table.to(both.device))
    atoms = [len(axis.atoms) for axis in plan.axes]
    G = G.view(groups, *atoms, *plan.phases, c, *plan.phases, c)
    order = chain.from_iterable((1 + i, 1 + dims + i, 2 + 2 * dims + i) for i in range(dims))
    G = G.permute(0, *order, 1 + 2 * dims, 2 + 3 * dims)
    for i, axis in enumerate(plan.axes):
        G = _pairs_from_atoms(axis, G.flatten(1 + i, 3 + i), 1 + i)
    kernels = [axis.kernel for axis in plan.axes]
    G = G.view(groups, *chain.from_iterable((k, k) for k in kernels), c, c)
    left, right = range(1, 1 + 2 * dims, 2), range(2, 2 + 2 * dims, 2)
    G = G.permute(0, *left, 1 + 2 * dims, *right, 2 + 2 * dims)
    d = c * prod(kernels)
    return G.reshape(groups, d, d)


def _edge_cells(plan: LagPlan, X: Tensor, edge: tuple[int, ...]) -> Tensor:
    """The cells at the slabs of some dimensions and the lags of the others."""
    slabs = list(product(*(plan.axes[i].slabs for i in edge)))
    near_places, far_places = ([[s[side] for s in slab] for slab in slabs] for side in (0, 1))
    A = B = _stacked(plan, X, edge, near_places)
    if far_places != near_places:
        B = _stacked(plan, X, edge, far_places)
    rest = plan.rest(edge)
    tables = []
    for lags in plan.half(rest):
        near, far = [], []
        for i, lag in zip(rest, lags, strict=True):
            start = max(0, -lag)
            stop = max(start, plan.axes[i].length - max(0, lag))
            near.append(slice(start, stop))
            far.append(slice(start + lag, stop + lag))
        a, b = A[(_ALL, _ALL, *near)].flatten(2, -2), B[(_ALL, _ALL, *far)].flatten(2, -2)
        tables.append(a.mT @ b)
    return _among_all_phases(plan, torch.cat(tables, dim=1), edge)


def _stacked(
    plan: LagPlan, X: Tensor, edge: tuple[int, ...], places: Sequence[Sequence[int]]
) -> Tensor:
    """``X`` at several places, ``[groups, places, *rest, rows, channels]``."""
    return torch.stack([_at(plan, X, edge, here) for here in places], dim=1)


def _at(plan: LagPlan, X: Tensor, edge: tuple[int, ...], places: Sequence[int]) -> Tensor:
    """``X`` at places of some dimensions, with only the phases that have slabs there."""
    where = dict(zip(edge, places, strict=True))
    index: list[int | slice] = [where.get(i, _ALL) for i in plan.moving]
    phases = X.unflatten(-1, (*plan.phases, -1))
    here: Tensor = phases[(_ALL, *index, _ALL, *_slab_phases(plan, edge))]
    return here.flatten(-len(plan.axes) - 1)


def _slab_phases(plan: LagPlan, edge: tuple[int, ...]) -> list[slice]:
    return [axis.slab_phases if i in edge else _ALL for i, axis in enumerate(plan.axes)]


def _among_all_phases(plan: LagPlan, cells: Tensor, edge: tuple[int, ...]) -> Tensor:
    """The cells of some phases, with 0 for all other phases."""
    slabbed = _slab_phases(plan, edge)
    counts = [len(range(count)[part]) for count, part in zip(plan.phases, slabbed, strict=True)]
    if counts == list(plan.phases):
        return cells
    groups, number, channels, _ = cells.shape
    c = channels // prod(counts)
    out = cells.new_zeros(groups, number, *plan.phases, c, *plan.phases, c)
    part = cells.view(groups, number, *counts, c, *counts, c)
    out[(_ALL, _ALL, *slabbed, _ALL, *slabbed)] = part
    width = prod(plan.phases) * c
    return out.view(groups, number, width, width)


def _pairs_from_atoms(axis: Axis, G: Tensor, dim: int) -> Tensor:
    """Exchange a dimension ``(atom, phase, phase')`` for ``(tap, tap')``."""
    lags, pairs, slabs = (index.to(G.device) for index in _pairs(axis))
    out = G.index_select(dim, lags)
    return out.index_add_(dim, pairs, G.index_select(dim, slabs), alpha=-1) if len(slabs) else out


@lru_cache(maxsize=1024)
def _pairs(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """For every pair of taps its lag; then pairs with the slabs to take away from them."""
    lags, pairs, slabs = [], [], []
    for pair, ((a, s), (b, t)) in enumerate(product(axis.taps, axis.taps)):
        phases, each = a * axis.phases + b, axis.phases**2
        lags.append(axis.atoms[t - s] * each + phases)
        for slab in axis.outside[pair]:
            pairs.append(pair)
            slabs.append(axis.atoms[slab] * each + phases)
    return torch.tensor(lags), torch.tensor(pairs).long(), torch.tensor(slabs).long()
