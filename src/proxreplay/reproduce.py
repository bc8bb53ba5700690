"""The paper's tables and figures as studies: what has to be run, and ours beside the paper's."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxreplay.errors import InputError
from proxreplay.evaluation import Estimate
from proxreplay.evaluation.measures import MAIN
from proxreplay.experiments.jobs import Block
from proxreplay.files import write_text
from proxreplay.report.grouping import Section, read_study
from proxreplay.report.plots import FIGURES, save
from proxreplay.report.tables import main_table, several_codes, to_markdown

REPLAY = ("er", "lpr-er", "der", "lpr-der", "ema", "lpr-ema", "lode", "lpr-lode")
UNLIMITED = None
MEMORY = {"split-cifar100": 2000, "split-tinyimagenet": 4000, "online-clear": 2000}


_DRIFT, _GRADIENTS = ({"diagnostics.drift": "paper"},), ({"diagnostics.gradients_every": 30},)


@dataclass(frozen=True)
class Reproduction:
    """A table or figure of the paper."""

    name: str  # as users write it
    about: str  # one line
    blocks: tuple[Block, ...]  # what has to be run
    # which of `FIGURES` to draw, by file name
    figures: Mapping[str, str] = field(default_factory=dict)


def _sensitivity(benchmark: str, seeds: int) -> tuple[Block, ...]:
    memory = MEMORY[benchmark]
    grid = tuple(
        {"refresh.every": every, "refresh.samples": samples}
        for samples in (memory // 20, memory // 5, None)
        for every in (5, 10, 50)
    )
    return (
        Block(benchmark, ("er",), (memory,), seeds),
        Block(benchmark, ("lpr-er",), (memory,), seeds, grid),
    )


REPRODUCTIONS: Mapping[str, Reproduction] = {
    r.name: r
    for r in (
        Reproduction(
            "table1",
            "Split-CIFAR100, memory 1000 and 2000",
            (Block("split-cifar100", REPLAY, (1000, 2000), 10),),
            {"curves.png": "appendix"},
        ),
        Reproduction(
            "table2",
            "Split-TinyImageNet, memory 2000 and 4000",
            (Block("split-tinyimagenet", REPLAY, (2000, 4000), 10),),
            {"curves.png": "appendix"},
        ),
        Reproduction(
            "table3",
            "Online CLEAR, memory 1000 and 2000",
            (Block("online-clear", REPLAY[:6], (1000, 2000), 5),),
            {"curves.png": "appendix"},
        ),
        Reproduction(
            "unlimited",
            "ER and LPR (ER) with a memory without limit; refreshes see 2,000 examples",
            tuple(
                Block(name, REPLAY[:2], (UNLIMITED,), 5, ({"refresh.samples": 2000},))
                for name in MEMORY
            ),
        ),
        Reproduction(
            "projections",
            "A-GEM and AOP beside LPR (ER)",
            tuple(Block(name, ("agem", "aop", "lpr-er"), (m,), 5) for name, m in MEMORY.items()),
        ),
        Reproduction(
            "sensitivity",
            "LPR (ER) over refresh interval T and share p of the memory, with wall-clock time",
            (
                *_sensitivity("split-cifar100", 10),
                *_sensitivity("split-tinyimagenet", 10),
                *_sensitivity("online-clear", 5),
            ),
            {"sensitivity.png": "sensitivity"},
        ),
        Reproduction(
            "figure1",
            "representation drift and variation of accuracy on task 1 of Split-CIFAR100",
            (Block("split-cifar100", REPLAY[:2], (2000,), 5, _DRIFT),),
            {"figure1.png": "figure-1"},
        ),
        Reproduction(
            "figure2",
            "gradient norms before and after preconditioning on Split-CIFAR100",
            (Block("split-cifar100", ("lpr-er",), (2000,), 5, _GRADIENTS),),
            {"figure2.png": "figure-2"},
        ),
    )
}


def find_reproduction(name: str) -> Reproduction:
    """The table or figure of that name."""
    if name not in REPRODUCTIONS:
        raise InputError(f"unknown table or figure '{name}'; there are {', '.join(REPRODUCTIONS)}.")
    return REPRODUCTIONS[name]


@dataclass(frozen=True)
class Beside:
    """One of our numbers beside the paper's."""

    row: str  # benchmark, memory, method
    measure: str  # Acc, AAA or WC-Acc
    ours: Estimate  # mean and standard error over our seeds
    paper: Estimate  # the paper's

    @property
    def standard_errors(self) -> float:
        """The difference in standard errors of the difference (the paper's alone for one seed)."""
        own = 0.0 if math.isnan(self.ours.standard_error) else self.ours.standard_error
        return (self.ours.mean - self.paper.mean) / math.hypot(own, self.paper.standard_error)


def beside_paper(section: Section) -> list[Beside]:
    """Every number of a section that the paper has too."""
    found = []
    rows = main_table(section).rows
    for ours, theirs in itertools.pairwise(rows):
        if theirs.source != "paper":
            continue
        for measure, mine, papers in zip(MAIN, ours.estimates, theirs.estimates, strict=True):
            if mine is not None and papers is not None:
                row = f"{section.title}: {ours.label}"
                found.append(Beside(row, measure.label, mine, papers))
    return found


def conclude(reproduction: Reproduction, out: Path, *, quick: bool) -> tuple[str, list[Beside]]:
    """Write the tables and figures of the runs below ``out``; returns the tables as Markdown."""
    study = read_study([out])
    label = " (quick protocol: smaller, not comparable with the paper)" if quick else ""
    text = f"# {reproduction.name}: {reproduction.about}{label}\n\n"
    beside = []
    for section in study.sections:
        text += f"## {section.title}\n\n{to_markdown(main_table(section))}\n"
        note = several_codes(run.environment for run in section.runs)
        text += f"{note}\n\n" if note else ""
        beside += [] if quick else beside_paper(section)
        for name, figure in reproduction.figures.items():
            save(FIGURES[figure](section), out / f"{section.slug}-{name}")
    write_text(out / "tables.md", text)
    return text, beside
