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


# What the parts of the work cost, in nanoseconds of one core at float32
MULTIPLY = 0.0225  # one multiply-add of a large product
READ = 0.27  # one element of an operand of a product
ROW = 2.0  # one row of both operands
TRANSFORM = 0.03  # one multiply-add of a transform, whose other operand is as long as the data
START = 300.0  # one product of a batch of products
CALL = 5000.0  # one call of torch
GATHER = 4.5  # one element copied into patches
MOVE = 0.6  # one element copied, added or written


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


def cost(path: Path, work: Work) -> float:
    """Predicted nanoseconds of one path to the Gram matrix."""
    return _COSTS[path](work)


def cheapest(work: Work) -> Path:
    """The path with the lowest predicted cost."""
    axes = work.plan.axes
    if min(axis.length for axis in axes) == 0 or prod(len(axis.atoms) for axis in axes) > MAX_CELLS:
        return "patches"
    paths: tuple[Path, ...] = ("patches", "shifts", "spectrum")
    return min(paths if work.plan.moving else paths[:2], key=lambda path: cost(path, work))


def _product(count: float, rows: float, left: float, right: float) -> float:
    """``count`` products ``[rows, left]' [rows, right]``."""
    a_row = left * right * MULTIPLY + (left + right) * READ + ROW
    return CALL + count * (START + rows * a_row + left * right * MOVE)


def _patches(work: Work) -> float:
    rows = work.n * prod(axis.positions for axis in work.plan.axes)
    d = work.channels * prod(axis.kernel for axis in work.plan.axes)
    plain = all(axis.kernel == axis.stride == 1 for axis in work.plan.axes)  # x is Z
    copy = 0.0 if plain else GATHER * work.groups * rows * d
    halves = 0.65 if d >= HALVED_FROM else 1.0  # of the products of a symmetric matrix
    return copy + halves * _product(work.groups, rows, d, d) + 10 * CALL


def _shifts(work: Work) -> float:
    plan = work.plan
    margins = [0, *plan.longest[1:]]
    places = prod(length + margin for length, margin in zip(work.lengths, margins, strict=False))
    lags = len(plan.half(plan.moving))
    products = lags * _product(work.groups, places * work.rows, work.width, work.width)
    return products + _shared(work, places)


def _spectrum(work: Work) -> float:
    plan, width, rows = work.plan, work.width, work.rows
    periods = [length + lag for length, lag in zip(work.lengths, plan.longest, strict=True)]
    places, transforms, done = prod(work.lengths), 0.0, 1.0
    for i, (length, period) in enumerate(zip(work.lengths, periods, strict=True)):
        places //= length
        frequencies = period // 2 + 1 if i == 0 else period
        one = 2 * frequencies * length * (1 if i == 0 else 2)
        transforms += done * places * rows * width * one * TRANSFORM
        done *= frequencies
    lags = len(plan.half(plan.moving))
    products = _product(work.groups * done, 2 * rows, width, width)
    products += _product(work.groups, done, 2 * lags, width * width)
    passes = 3 * done * rows * width * MOVE
    return work.groups * (transforms + passes) + products + _shared(work, prod(work.lengths))


def _shared(work: Work, places: float) -> float:
    """Spreading the input, the cells at the edges, and putting the matrix together."""
    plan, rows, width = work.plan, work.rows, work.width
    total = work.groups * places * rows * width * 2 * MOVE
    for edge in plan.edges:
        part = width
        for i in edge:
            axis = plan.axes[i]
            part = part * len(range(axis.phases)[axis.slab_phases]) // axis.phases
        slabs = prod(len(plan.axes[i].slabs) for i in edge)
        rest = [i for i in plan.moving if i not in edge]
        inner = prod(plan.axes[i].length for i in rest) * rows
        total += 2 * slabs * (work.groups * inner * part * MOVE + 3 * CALL)
        lags = len(plan.half(rest))
        total += lags * _product(work.groups * slabs, inner, part, part)
    d = work.channels * prod(axis.kernel for axis in plan.axes)
    cells = prod(len(axis.atoms) for axis in plan.axes) * width**2
    total += work.groups * (2 * cells + 8 * d * d) * MOVE
    return total + (30 + 4 * prod(plan.phases)) * CALL


_COSTS: dict[Path, Callable[[Work], float]] = {
    "patches": _patches,
    "shifts": _shifts,
    "spectrum": _spectrum,
}
