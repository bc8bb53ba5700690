"""Tables of a comparison: mean and standard error over seeds, and the paired difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from proxreplay.evaluation import Estimate, estimate
from proxreplay.experiments.results import Result

MEASURES = {"acc": "Acc", "aaa": "AAA", "wc_acc": "WC-Acc"}


@dataclass(frozen=True)
class Row:
    """One line of a table: a label and an estimate a measure."""

    label: str
    estimates: tuple[Estimate, ...]


def comparison_rows(results: Mapping[str, Sequence[Result]]) -> list[Row]:
    """A row a method, and for two methods their difference, seed by seed.

    Args:
        results: label of the method -> one result a seed, in the same order of seeds.
    """
    values = {
        method: [np.array([getattr(r, measure) for r in runs]) for measure in MEASURES]
        for method, runs in results.items()
    }
    rows = [Row(method, tuple(estimate(v) for v in columns)) for method, columns in values.items()]
    if len(values) == 2:
        first, second = values.values()
        paired = (estimate(b - a) for a, b in zip(first, second, strict=True))
        rows.append(Row("difference", tuple(paired)))
    return rows


def format_estimate(value: Estimate, *, signed: bool = False) -> str:
    """Mean +- standard error with four decimals, as the paper prints them.

    >>> format_estimate(Estimate(0.33341, 0.0056, 10))
    '0.3334 ± 0.0056'
    """
    return f"{value.mean:{'+' if signed else ''}.4f} ± {value.standard_error:.4f}"


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| Method | " + " | ".join(MEASURES.values()) + " |", "|---" * 4 + "|"]
    for row in rows:
        signed = row.label == "difference"
        cells = [format_estimate(e, signed=signed) for e in row.estimates]
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
