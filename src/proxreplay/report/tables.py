"""Tables from one model: mean and standard error over seeds, ours beside the paper's.

A `Table` is drawn on the terminal, as Markdown, LaTeX or CSV, or by the page.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from proxreplay.evaluation import MEASURES, Estimate, PairedDifference, estimate, paired_difference
from proxreplay.evaluation.measures import MAIN, Measure
from proxreplay.experiments.recipes import METHODS
from proxreplay.experiments.results import Result, StoredRun, made_with
from proxreplay.report.grouping import Group, Section, Study, label_of
from proxreplay.report.paper import PaperRow, paper_row

FURTHER = tuple(m for m in MEASURES if m.number is not None and not m.main)
MOST_CODES = 6  # that are named
FEW_SEEDS = 5  # with fewer, standard errors are too rough to call anything best


@dataclass(frozen=True)
class Row:
    """One line of a table: a label and an estimate for every column."""

    label: str  # of the method
    estimates: tuple[Estimate | None, ...]  # None where there is no number
    # who measured it; a difference is second minus first and printed with its sign, a
    # ceiling competes with no method
    source: Literal["ours", "paper", "difference", "ceiling"] = "ours"

    @property
    def seeds(self) -> int:
        """How many seeds its numbers come from."""
        return max((e.seeds for e in self.estimates if e is not None), default=0)


@dataclass(frozen=True)
class Table:
    """Rows of estimates under named columns."""

    title: str  # what it is about
    columns: tuple[Measure, ...]  # the measures
    rows: tuple[Row, ...]  # one per method, the paper's after ours

    def is_best(self, row: Row, column: int) -> bool:
        """Whether the number is the best of its source, or tied with it.

        Tied means that it is no further from the best than the standard error of their difference,
        ``sqrt(se^2 + se_best^2)``. With fewer than `FEW_SEEDS` seeds nothing is called best.
        """
        mine, better = row.estimates[column], self.columns[column].better
        rivals = [r.estimates[column] for r in self.rows if r.source == row.source]
        known = [e for e in rivals if e is not None]
        competes = row.source in ("ours", "paper")
        if mine is None or not competes or better is None or len(known) < 2:
            return False
        sign = -1 if better == "lower" else 1
        best = max(known, key=lambda e: sign * e.mean)
        slack = math.hypot(mine.standard_error, best.standard_error)
        return min(mine.seeds, best.seeds) >= FEW_SEEDS and abs(best.mean - mine.mean) <= slack


# What tables are about --------------------------------------------------------------------------


def comparison_rows(runs: Iterable[StoredRun]) -> list[Row]:
    """One row per method, then its difference from the first on the seeds that both completed.

    Runs are in any state; the method of the first one is the reference.
    """
    results: dict[str, dict[int, Result]] = {}
    for run in runs:
        if run.config is not None:
            done = results.setdefault(label_of(run.config.method), {})
            done |= {} if run.result is None else {run.config.seed: run.result}
    rows = [
        Row(label, tuple(_estimate(r.measures[m.key] for r in done.values()) for m in MAIN))
        for label, done in results.items()
    ]
    (reference, first), *others = results.items()
    for label, done in others:
        shared = [(first[s].measures, done[s].measures) for s in first if s in done]
        paired = tuple(_estimate(_minus(b[m.key], a[m.key]) for a, b in shared) for m in MAIN)
        name = "difference" if len(others) == 1 else f"{label} minus {reference}"
        rows.append(Row(name, paired, "difference"))
    return rows


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def main_table(section: Section) -> Table:
    """Acc, AAA and WC-Acc of a section, the paper's numbers under ours where it has them."""
    rows = []
    for group in section.groups:
        rows.append(_group_row(group, MAIN))
        theirs = paper_row_of(section, group)
        if theirs is not None:
            numbers = tuple(theirs.measures.get(measure.key) for measure in MAIN)
            rows.append(Row(theirs.method.replace("(", " ("), numbers, "paper"))
    return Table(section.title, MAIN, tuple(rows))


def paper_row_of(section: Section, group: Group) -> PaperRow | None:
    """The paper's numbers, if it has some for this method, and the runs have its settings."""
    if not section.as_in_the_paper(group):
        return None
    return paper_row(section.benchmark, group.method, section.memory)


def further_table(section: Section) -> Table:
    """Stability and time: every other measure that at least one run has."""
    groups = section.groups
    kept = tuple(m for m in FURTHER if any(group.values(m.key) for group in groups))
    return Table(section.title, kept, tuple(_group_row(group, kept) for group in groups))


@dataclass(frozen=True)
class Comparison:
    """A method with LPR against the same method without, on the seeds they share."""

    group: Group
    base: Group
    seeds: int
    differences: Mapping[str, PairedDifference]
    better: Mapping[str, int]


def comparisons(section: Section) -> list[Comparison]:
    """Every LPR group against its base."""
    found = []
    for group in section.groups:
        base = section.base_of(group) if group.base else None
        if base is None:
            continue
        differences, better, seeds = {}, {}, 0
        for measure in MAIN:
            ours, theirs = group.values(measure.key), base.values(measure.key)
            shared = sorted(ours.keys() & theirs.keys())
            if not shared:
                continue
            first, second = (np.array([v[s] for s in shared]) for v in (theirs, ours))
            differences[measure.key] = paired_difference(first, second)
            better[measure.key] = int((second > first).sum())
            seeds = max(seeds, len(shared))
        if differences:
            found.append(Comparison(group, base, seeds, differences, better))
    return found


def _group_row(group: Group, measures: Sequence[Measure]) -> Row:
    estimates = tuple(_estimate(group.values(m.key).values()) for m in measures)
    ceiling = group.method in METHODS and METHODS[group.method].iid
    return Row(group.label, estimates, "ceiling" if ceiling else "ours")


def _estimate(values: Iterable[float | None]) -> Estimate | None:
    known = [v for v in values if v is not None]
    return estimate(np.array(known)) if known else None


def several_codes(environments: Iterable[Mapping[str, Any]]) -> str | None:
    """A line about runs of different source codes, each of which may change numbers."""
    runs: dict[str, list[str]] = {}  # by code: what to call it, once per run
    for environment in environments:
        for made in made_with(environment):
            code, commit = (str(made.get(key) or "") for key in ("code", "git_commit"))
            named = f"code {code[:8]}" if code else f"commit {commit[:10]}"
            if code or commit:
                call = f"{made.get('proxreplay', 'version unknown')}, {named}"
                runs.setdefault(code or commit, []).append(_one_line(call)[:60])
    if len(runs) < 2:
        return None
    each = [f"{names[0]}: {len(names)} run{'s' * (len(names) > 1)}" for names in runs.values()]
    more = f"; and {len(each) - MOST_CODES} more" if len(each) > MOST_CODES else ""
    return (
        f"The runs were made with {len(runs)} different source codes of proxreplay "
        f"({'; '.join(each[:MOST_CODES])}{more}); differences between them may be that."
    )


# How they are drawn ------------------------------------------------------------------------------


def format_estimate(value: Estimate | None, *, signed: bool = False) -> str:
    """Mean +- standard error with four decimals, as the paper prints them.

    >>> format_estimate(Estimate(0.33341, 0.0056, 10))
    '0.3334 ± 0.0056'
    """
    if value is None:
        return "-"
    mean = f"{value.mean:{'+' if signed else ''}.4f}"
    return mean if math.isnan(value.standard_error) else f"{mean} ± {value.standard_error:.4f}"


def _cells(table: Table, row: Row, bold: str, usual: str = "{}", none: str = "-") -> list[str]:
    cells = []
    for i, value in enumerate(row.estimates):
        form = none if value is None else bold if table.is_best(row, i) else usual
        cells.append(form.format(format_estimate(value, signed=row.source == "difference")))
    return cells


def _label(row: Row) -> str:
    return f"{row.label}, paper" if row.source == "paper" else row.label


def to_markdown(table: Table) -> str:
    """For READMEs and issues."""
    lines = [
        "| Method | Seeds | " + " | ".join(m.label for m in table.columns) + " |",
        "|---" + "|---:" * (1 + len(table.columns)) + "|",
    ]
    for row in table.rows:
        cells = [_markdown(_label(row)), str(row.seeds), *_cells(table, row, "**{}**")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """Names come from files: without characters that end a line or steer a program."""
    return "".join(c if c.isprintable() else " " for c in text)


def _markdown(text: str) -> str:
    """Text that is no HTML, link, code or cell border."""
    special = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {c: f"\\{c}" for c in "\\`*[]|"}
    return "".join(special.get(c, c) for c in _one_line(text))


def to_latex(table: Table) -> str:
    """For papers; needs the booktabs package."""
    lines = [
        r"\begin{tabular}{lr" + "r" * len(table.columns) + "}",
        r"\toprule",
        " & ".join(["Method", "Seeds", *(_latex(m.label) for m in table.columns)]) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        cells = _cells(table, row, r"{{\boldmath${}$}}", "${}$", "--")
        numbers = [cell.replace("±", r"\pm") for cell in cells]
        lines.append(" & ".join([_latex(_label(row)), str(row.seeds), *numbers]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {c: f"\\{c}" for c in "&%$#_{}"}
    return "".join(special.get(c, c) for c in _one_line(text))


def _csv(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = _one_line(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def to_csv(table: Table) -> str:
    """For spreadsheets: numbers in full, one line per method and measure."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["table", "method", "source", "measure", "mean", "standard_error", "seeds"])
    for row in table.rows:
        for column, value in zip(table.columns, row.estimates, strict=True):
            if value is None:
                continue
            error = "" if math.isnan(value.standard_error) else repr(value.standard_error)
            numbers = [repr(value.mean), error, value.seeds]
            names = [_csv(table.title), _csv(row.label), row.source, column.label]
            writer.writerow([*names, *numbers])
    return buffer.getvalue()


FORMATS: Mapping[str, Callable[[Table], str]] = {
    ".md": to_markdown,
    ".tex": to_latex,
    ".csv": to_csv,
}


def tables_of(study: Study, ending: str) -> str:
    """All tables of a study as one text, for a file with one of the endings of `FORMATS`."""
    texts = []
    for section in study.sections:
        headings = {".md": f"## {_markdown(section.title)}\n\n"}
        headings[".tex"] = f"% {_one_line(section.title)}\n"
        tables = [table for table in (main_table(section), further_table(section)) if table.columns]
        note = several_codes(run.environment for run in section.runs)
        notes = {".md": f"\n{_markdown(note)}\n", ".tex": f"% {note}\n"} if note else {}
        texts.append(
            headings.get(ending, "")
            + "\n".join(FORMATS[ending](table) for table in tables)
            + notes.get(ending, "")
        )
    if ending == ".csv":  # one header for all
        lines = [line for text in texts for line in text.splitlines(keepends=True) if line.strip()]
        return "".join([*lines[:1], *(line for line in lines if line != lines[0])])
    return "\n".join(texts)
