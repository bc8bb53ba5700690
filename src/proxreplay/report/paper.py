"""The paper's numbers as data (`paper.json`), found by benchmark, method and memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from proxreplay.evaluation import Estimate

_BENCHMARKS = {
    "split-cifar100": "cifar100",
    "split-tinyimagenet": "tinyimagenet",
    "online-clear": "clear",
}
_METHODS = {
    **{base: base.upper() for base in ("er", "der", "ema", "lode", "aop", "agem")},
    **{f"lpr-{base}": f"LPR({base.upper()})" for base in ("er", "der", "ema", "lode")},
}
_COLUMNS = ("acc", "aaa", "wc_acc")
# The memory that the table of projection baselines states for each benchmark.
_PROJECTION_MEMORY = {"cifar100": 2000, "tinyimagenet": 4000, "clear": 2000}

ONLINE_NOTE = (
    "The paper's AAA and WC-Acc of EMA methods are those of the online network, not of the average."
)


@dataclass(frozen=True)
class PaperRow:
    """One row of one of the paper's tables."""

    method: str  # as the paper prints it
    measures: Mapping[str, Estimate]  # Acc, AAA and WC-Acc by key
    note: str | None = None  # what to know before comparing


@lru_cache
def paper() -> dict[str, Any]:
    """Everything in `paper.json`."""
    text = resources.files("proxreplay.report").joinpath("paper.json").read_text("utf-8")
    return dict(json.loads(text))


def paper_sensitivity(benchmark: str, share: float) -> list[tuple[int, float]]:
    """The paper's final accuracy of LPR (ER) by T, for a share of the memory; empty for none."""
    key = {0.05: "p.05", 0.2: "p.20", 1.0: "p1"}.get(share)
    if benchmark not in _BENCHMARKS or key is None:
        return []
    row = paper()["sensitivity"][_BENCHMARKS[benchmark]]["acc"][key]
    return [(int(t[1:]), value[0]) for t, value in row.items()]


def paper_row(benchmark: str, method: str, memory: int | None) -> PaperRow | None:
    """The paper's row for a method on a benchmark; None where it has none.

    ``memory=None`` is one without limit.

    >>> row = paper_row("split-cifar100", "lpr-er", 2000)
    >>> row.measures["acc"]
    Estimate(mean=0.3334, standard_error=0.0056, seeds=10)
    """
    data, name = _BENCHMARKS.get(benchmark), _METHODS.get(method)
    if data is None or name is None:
        return None
    seeds = 5
    numbers: list[float] | None
    if name in ("AOP", "AGEM"):
        stated = memory == _PROJECTION_MEMORY[data]
        numbers = paper()["projection_baselines"][data].get(name) if stated else None
    elif memory is None:
        numbers = paper()["memory_unconstrained"][data].get(name)
    else:
        table = paper()["memory_constrained"][data]
        seeds = table["seeds"]
        numbers = table.get(str(memory), {}).get(name)
    if numbers is None:
        return None
    measures = {
        key: Estimate(mean, error, seeds)
        for key, mean, error in zip(_COLUMNS, numbers[::2], numbers[1::2], strict=True)
    }
    return PaperRow(name, measures, ONLINE_NOTE if "EMA" in name else None)
