"""Commands that tell what there is: benchmarks and methods."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxreplay.cli.runs import DataRoot
from proxreplay.errors import InputError

if TYPE_CHECKING:
    from proxreplay.experiments.config import RunConfig


def benchmarks(data_root: DataRoot = None) -> None:
    """List the benchmarks: what each is made of, and whether its data is there."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from proxreplay.experiments.benchmarks import BENCHMARKS

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("Benchmark", "Stream", "S", "Memory", "Settings", "Data"):
        table.add_column(heading, no_wrap=True)
    missing = []
    for benchmark in BENCHMARKS.values():
        data = benchmark.status(data_root)
        if not data.found:
            missing.append(f"{data.name}: {data.way_out}")
        table.add_row(
            benchmark.name,
            describe_scenario(benchmark.scenario),
            str(benchmark.steps_per_batch),
            str(benchmark.capacity),
            "the paper's" if benchmark.from_paper else "defaults",
            "there" if data.found else "missing",
        )
    table.add_row("custom", "--data PATH --tasks N", "3", "500", "defaults", "yours")
    console = Console()
    console.print(table)
    if missing:
        console.print("To get what is missing:")
        for line in missing:
            console.print(f"  {line}", soft_wrap=True, highlight=False)


def describe_scenario(scenario: object) -> str:
    """A scenario in a few words."""
    from proxreplay.data.scenarios import IID, Blurry, ClassIncremental, DomainIncremental

    match scenario:
        case ClassIncremental(tasks=tasks):
            return f"{tasks} tasks of classes"
        case DomainIncremental():
            return "a task a domain"
        case Blurry(tasks=tasks):
            return f"{tasks} blurry tasks"
        case IID(tasks=tasks):
            return f"i.i.d., {tasks} parts"
    return type(scenario).__name__


def methods(
    benchmark: Annotated[
        str, typer.Option(metavar="NAME", help="Show the settings on this benchmark.")
    ] = "split-cifar100",
) -> None:
    """List the methods and the settings each would use on a benchmark."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from proxreplay.experiments.configure import configure
    from proxreplay.experiments.recipes import LPR_PREFIX, METHODS

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("Method", no_wrap=True)
    table.add_column("What it does")
    table.add_column(f"Settings on {benchmark}")
    for method in METHODS.values():
        if not method.name.startswith(LPR_PREFIX):
            table.add_row(method.name, method.about, _settings(configure(benchmark, method.name)))
    console = Console()
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("With LPR", no_wrap=True)
    table.add_column(f"Settings on {benchmark} beyond those of the method alone")
    for method in METHODS.values():
        if method.name.startswith(LPR_PREFIX):
            config = configure(benchmark, method.name)
            table.add_row(method.name, _settings(config, only=("lpr.", "refresh.")))
    console.print(table)


def _settings(config: "RunConfig", only: tuple[str, ...] = ("",)) -> str:
    from proxreplay.experiments.recipes import find_method

    flat = config.flat()
    keys = [key for key in ("lr", *find_method(config.method).uses) if key.startswith(only)]
    unset = {"refresh.samples": "all", "projection.alpha": "its own"}
    return "  ".join(f"{k}={unset[k] if flat[k] is None else flat[k]}" for k in keys)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Default: report.html in the first folder. With .md, .tex or .csv: the tables.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep it current while runs go on.")
    ] = False,
) -> None:
    """Write one self-contained HTML page about all runs in the folders, or their tables."""
    from proxreplay.report.page import write_report, write_tables
    from proxreplay.report.tables import FORMATS

    page = out or folders[0] / "report.html"
    only_tables = page.suffix in FORMATS
    if not only_tables and page.suffix not in (".html", ".htm"):
        endings = ", ".join([".html", *FORMATS])
        raise InputError(f"--out {page}: its ending says what to write; give one of {endings}.")
    if watch and only_tables:
        raise InputError(f"--watch keeps a page current, but {page} is a file of tables.")
    if watch:
        from proxreplay.report.watch import watch_report

        typer.echo(f"Keeping {page} current; Ctrl-C to stop.")
        watch_report(folders, page)
        return
    summary = (write_tables if only_tables else write_report)(folders, page)
    for sentence in summary.verdict:
        typer.echo(sentence)
    counts = ", ".join(f"{count} {status}" for status, count in summary.statuses.items())
    typer.echo(f"{summary.runs} runs ({counts}): {page}")


def figure(
    name: Annotated[str, typer.Argument(help="Such as accuracy, tasks, time, appendix, figure-1.")],
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the pictures go.")] = Path("."),
    ending: Annotated[str, typer.Option(metavar="EXT", help="png, pdf or svg.")] = "png",
) -> None:
    """Draw one figure from the runs in the folders, a picture for each stream and memory."""
    from proxreplay.report.grouping import read_study
    from proxreplay.report.plots import FIGURES, save

    if name not in FIGURES:
        raise InputError(f"unknown figure '{name}'; there are {', '.join(FIGURES)}.")
    for section in read_study(folders).sections:
        path = out / f"{name}-{section.slug}.{ending}"
        save(FIGURES[name](section), path)
        typer.echo(str(path))


COMMANDS = (benchmarks, methods, report, figure)
EXAMPLES = {
    "benchmarks": "Example: proxreplay benchmarks --data-root data",
    "methods": "Example: proxreplay methods --benchmark split-digits",
    "figure": "Example: proxreplay figure accuracy runs/compare-split-digits --out pictures",
    "report": "Example: proxreplay report runs/compare-split-digits",
}
