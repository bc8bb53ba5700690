"""Which way to the Gram matrix of a convolution is the cheapest: a cost model in nanoseconds.

The constants are measured (``python -m benchmarks.gram_paths`` prints them beside the times they
predict); only their ratios matter, which hold from one core to many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from proxreplay.proximal.gram.lags import LagPlan

Path = Literal["patches", "shifts", "spectrum"]

MAX_CELLS = 4096  # beyond that, planning costs more than it can save
HALVED_FROM = 384  # columns from which on ``Z'Z`` is multiplied by halves


@dataclass(frozen=True)
class Prices:
    """What the parts of the work cost, in nanoseconds of one core at float32."""

    multiply: float = 0.0225  # one multiply-add of a large product
    read: float = 0.27  # one element of an operand of a product
    row: float = 2.0  # one row of both operands
    # one multiply-add of a transform, whose other operand is as long as the data
    transform: float = 0.03
    start: float = 300.0  # one product of a batch of products
    call: float = 5000.0  # one call of torch
    gather: float = 4.5  # one element copied into patches
    move: float = 0.6  # one element copied, added or written

    def product(self, count: float, rows: float, left: float, right: float) -> float:
        """``count`` products ``[rows, left]' [rows, right]``."""
        a_row = left * right * self.multiply + (left + right) * self.read + self.row
        return self.call + count * (self.start + rows * a_row + left * right * self.move)


@dataclass(frozen=True)
class Work:
    """A convolution whose Gram matrix is wanted."""

    plan: LagPlan  # its geometry
    n: int  # examples
    groups: int  # as the layer's
    channels: int  # of the input, a group

    @property
    def lengths(self) -> list[int]:
        """Of the moving dimensions."""
        return [self.plan.axes[i].length for i in self.plan.moving]

    @property
    def rows(self) -> int:
        """Examples times the places of the dimensions in which patches do not overlap."""
        return self.n * prod(self.plan.axes[i].length for i in self.plan.flat)

    @property
    def width(self) -> int:
        """Channels and phases."""
        return self.channels * prod(axis.phases for axis in self.plan.axes)


def cost(path: Path, work: Work, prices: Prices | None = None) -> float:
    """Predicted nanoseconds of one path to the Gram matrix."""
    return _COSTS[path](work, prices or Prices())


def cheapest(work: Work) -> Path:
    """The path with the lowest predicted cost."""
    axes = work.plan.axes
    if min(axis.length for axis in axes) == 0 or prod(len(axis.atoms) for axis in axes) > MAX_CELLS:
        return "patches"
    paths: tuple[Path, ...] = ("patches", "shifts", "spectrum")
    return min(paths if work.plan.moving else paths[:2], key=lambda path: cost(path, work))


def _patches(work: Work, prices: Prices) -> float:
    rows = work.n * prod(axis.positions for axis in work.plan.axes)
    d = work.channels * prod(axis.kernel for axis in work.plan.axes)
    plain = all(axis.kernel == axis.stride == 1 for axis in work.plan.axes)  # x is Z
    copy = 0.0 if plain else prices.gather * work.groups * rows * d
    halves = 0.65 if d >= HALVED_FROM else 1.0  # of the products of a symmetric matrix
    return copy + halves * prices.product(work.groups, rows, d, d) + 10 * prices.call


def _shifts(work: Work, prices: Prices) -> float:
    plan = work.plan
    margins = [0, *plan.longest[1:]]
    places = prod(length + margin for length, margin in zip(work.lengths, margins, strict=False))
    lags = len(plan.half(plan.moving))
    products = lags * prices.product(work.groups, places * work.rows, work.width, work.width)
    return products + _shared(work, places, prices)


def _spectrum(work: Work, prices: Prices) -> float:
    plan, width, rows = work.plan, work.width, work.rows
    periods = [length + lag for length, lag in zip(work.lengths, plan.longest, strict=True)]
    places, transforms, done = prod(work.lengths), 0.0, 1.0
    for i, (length, period) in enumerate(zip(work.lengths, periods, strict=True)):
        places //= length
        frequencies = period // 2 + 1 if i == 0 else period
        one = 2 * frequencies * length * (1 if i == 0 else 2)
        transforms += done * places * rows * width * one * prices.transform
        done *= frequencies
    lags = len(plan.half(plan.moving))
    products = prices.product(work.groups * done, 2 * rows, width, width)
    products += prices.product(work.groups, done, 2 * lags, width * width)
    passes = 3 * done * rows * width * prices.move
    return (
        work.groups * (transforms + passes) + products + _shared(work, prod(work.lengths), prices)
    )


def _shared(work: Work, places: float, prices: Prices) -> float:
    """Spreading the input, the cells at the edges, and putting the matrix together."""
    plan, rows, width = work.plan, work.rows, work.width
    total = work.groups * places * rows * width * 2 * prices.move
    for edge in plan.edges:
        part = width
        for i in edge:
            axis = plan.axes[i]
            part = part * len(range(axis.phases)[axis.slab_phases]) // axis.phases
        slabs = prod(len(plan.axes[i].slabs) for i in edge)
        rest = [i for i in plan.moving if i not in edge]
        inner = prod(plan.axes[i].length for i in rest) * rows
        total += 2 * slabs * (work.groups * inner * part * prices.move + 3 * prices.call)
        lags = len(plan.half(rest))
        total += lags * prices.product(work.groups * slabs, inner, part, part)
    d = work.channels * prod(axis.kernel for axis in plan.axes)
    cells = prod(len(axis.atoms) for axis in plan.axes) * width**2
    total += work.groups * (2 * cells + 8 * d * d) * prices.move
    return total + (30 + 4 * prod(plan.phases)) * prices.call


_COSTS: dict[Path, Callable[[Work, Prices], float]] = {
    "patches": _patches,
    "shifts": _shifts,
    "spectrum": _spectrum,
}
