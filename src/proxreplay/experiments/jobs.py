"""Lists of runs to make: for a comparison, a grid of settings, and the tables of the paper."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxreplay.errors import InputError
from proxreplay.experiments.configure import configure
from proxreplay.experiments.engines import Job
from proxreplay.experiments.recipes import find_method
from proxreplay.experiments.run import RunOptions

Layers = Sequence[Mapping[str, Any]]
Grid = Mapping[str, Sequence[Any]]


def comparison(
    benchmark: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *layers: Mapping[str, Any],
    options: RunOptions | None = None,
) -> list[Job]:
    """Every method with every seed, each in a folder of its own below ``out``."""
    return [
        _job(out, f"{method}-seed{seed}", benchmark, method, (*layers, {"seed": seed}), options)
        for seed in seeds
        for method in methods
    ]


def grid_search(
    benchmark: str,
    method: str,
    grid: Grid,
    out: Path,
    *layers: Mapping[str, Any],
    options: RunOptions | None = None,
) -> list[Job]:
    """A run for every point of a grid; none of them looks at test examples."""
    if not grid or not all(grid.values()):
        raise InputError("sweep: an empty grid; give --grid KEY=V1,V2 or --grid paper.")
    jobs = []
    for point in itertools.product(*grid.values()):
        values = dict(zip(grid, point, strict=True))
        name = "-".join([method, *(f"{k}={v}" for k, v in values.items())])
        jobs.append(_job(out, name, benchmark, method, (*layers, values, {"test": False}), options))
    return jobs


@dataclass(frozen=True)
class Block:
    """Runs on one benchmark that a table or figure of the paper needs."""

    benchmark: str  # by name
    methods: tuple[str, ...]  # the rows
    capacities: tuple[int | None, ...]  # of the memory; None is without limit
    seeds: int  # as many as the paper took
    variants: tuple[Mapping[str, Any], ...] = ({},)  # further settings, one group of runs each


@dataclass(frozen=True)
class Selection:
    """Which part of a table or figure to run."""

    rows: Sequence[str] | None = None  # methods; None for all
    capacity: int | None = None  # only this capacity; None for all
    benchmark: str | None = None  # only this benchmark; None for all
    seeds: Sequence[int] | None = None  # None for as many as the paper
    quick: bool = False  # the smaller protocol, labelled as such


# The paper's tables use the whole memory and exact factors.
PAPER: Mapping[str, Any] = {"refresh.samples": None, "lpr.tolerance": 0.0}

# The same shape, smaller: short tasks, a smaller memory, sparse evaluation.
QUICK = {"stream.limit": 200, "eval_every": 10, "refresh.samples": 100}
QUICK_SHARE = 10


def reproduction(
    blocks: Sequence[Block],
    selection: Selection,
    out: Path,
    *layers: Mapping[str, Any],
    options: RunOptions | None = None,
) -> list[Job]:
    """The runs that a table or figure of the paper needs."""
    for row in selection.rows or ():
        find_method(row)
    jobs = []
    for block in blocks:
        if selection.benchmark not in (None, block.benchmark):
            continue
        for method, values, name in _selected(block, selection):
            jobs.append(_job(out, name, block.benchmark, method, (PAPER, *layers, values), options))
    if not jobs:
        raise InputError(
            "nothing left to run with this selection; look at --rows, --memory and --benchmark."
        )
    return jobs


def _selected(block: Block, selection: Selection) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Method, settings and folder name of each run of a block."""
    for seed, capacity, method, variant in itertools.product(
        range(block.seeds) if selection.seeds is None else selection.seeds,
        [c for c in block.capacities if selection.capacity in (None, c)],
        [m for m in block.methods if selection.rows is None or m in selection.rows],
        block.variants,
    ):
        values: dict[str, Any] = {"capacity": capacity, "seed": seed, **variant}
        if selection.quick:
            samples = values.get("refresh.samples")
            values |= {
                **QUICK,
                "capacity": capacity and capacity // QUICK_SHARE,
                "refresh.samples": samples and max(samples // QUICK_SHARE, 1),
            }
        size = "unlimited" if capacity is None else str(capacity)
        further = [f"{key.split('.')[-1]}{value}" for key, value in variant.items()]
        yield method, values, "-".join([block.benchmark, method, size, *further, f"seed{seed}"])


def _job(
    out: Path, name: str, benchmark: str, method: str, layers: Layers, options: RunOptions | None
) -> Job:
    config = configure(benchmark, method, *layers)
    return Job(config, out / "runs" / name, options or RunOptions())
