"""Commands that tell what there is (benchmarks, methods, settings), and what runs amounted to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from proxreplay.cli import late
from proxreplay.cli.options import DataRoot, benchmark_names, flag, method_names, option
from proxreplay.cli.text import say, terminal
from proxreplay.errors import DataError, InputError

if TYPE_CHECKING:
    from proxreplay.experiments.config import RunConfig

_ON_BENCHMARK = option(
    "NAME", "Show the settings on this benchmark.", autocompletion=benchmark_names
)
OnBenchmark = Annotated[str, _ON_BENCHMARK]


def benchmarks(data_root: DataRoot = None) -> None:
    """List the benchmarks: what each is made of, and whether its data is there."""
    table = _table("Benchmark", "Stream", "S", "Memory", "Settings", "Data")
    missing = []
    for benchmark in late.benchmarks.BENCHMARKS.values():
        data = benchmark.status(data_root)
        if not data.found:
            missing.append(f"{data.name}: {data.way_out}")
        table.add_row(
            benchmark.name,
            describe_scenario(benchmark.scenario),
            str(benchmark.steps_per_batch),
            str(benchmark.capacity),
            "paper" if benchmark.from_paper else "defaults",
            "there" if data.found else "missing",
        )
    own = (str(late.benchmarks.Defaults.steps_per_batch), str(late.benchmarks.Defaults.capacity))
    table.add_row(late.benchmarks.CUSTOM, "--data PATH --tasks N", *own, "defaults", "yours")
    console = terminal()
    console.print(table)
    if missing:
        console.print("To get what is missing:")
        for line in missing:
            console.print(f"  {line}", soft_wrap=True)


def describe_scenario(scenario: object) -> str:
    """A scenario in a few words."""
    match scenario:
        case late.scenarios.ClassIncremental(tasks=tasks):
            return f"{tasks} tasks of classes"
        case late.scenarios.DomainIncremental():
            return "one task per domain"
        case late.scenarios.Blurry(tasks=tasks):
            return f"{tasks} blurry tasks"
        case late.scenarios.IID(tasks=tasks):
            return f"i.i.d., {tasks} parts"
    return type(scenario).__name__


def methods(benchmark: OnBenchmark = "split-cifar100") -> None:
    """List the methods and the settings each would use on a benchmark."""
    alone = _table("Method", "What it does", f"Settings on {benchmark}")
    beyond = f"Settings on {benchmark} beyond those of the method alone"
    with_lpr, with_klpr = _table("With LPR", beyond), _table("With KLPR", beyond)
    for method in late.recipes.METHODS.values():
        if method.name.endswith(late.recipes.AVERAGED_SUFFIX):
            continue
        config = late.configure.configure(benchmark, method.name)
        if method.name.startswith(late.recipes.LPR_PREFIX):
            with_lpr.add_row(method.name, _settings(config, only=("lpr.", "refresh.")))
        elif method.name.startswith(late.recipes.KLPR_PREFIX):
            with_klpr.add_row(method.name, _settings(config, only=("lr", "klpr.", "step.")))
        else:
            alone.add_row(method.name, method.about, _settings(config))
    suffix = late.recipes.AVERAGED_SUFFIX
    after = f"{suffix} after a name (er-avg, lpr-er-avg) averages the weights for prediction; "
    for part in (alone, with_lpr, with_klpr, after + "averaging.* says how."):
        terminal().print(part)


def settings(
    method: Annotated[
        str | None,
        typer.Argument(help="Only what has an effect on this method.", autocompletion=method_names),
    ] = None,
    benchmark: OnBenchmark = "split-cifar100",
) -> None:
    """List every key of --set: its default on a benchmark and what it means."""
    config = late.configure.configure(benchmark, method or "lpr-er")
    values, texts = config.flat(), late.config.described()
    table = _table("Key", "Default", "What it is")
    for key in values:
        shown = method is None or late.configure.has_effect(key, config)
        if shown and key not in ("benchmark", "method"):
            table.add_row(key, str(values[key]).lower(), texts[key])
    terminal().print(table)


def _table(*headings: str) -> Table:
    """Words wrap, and only whole: the first column is never shortened."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, no_wrap=place == 0, overflow="fold")
    return table


def _settings(config: "RunConfig", only: tuple[str, ...] = ("",)) -> str:
    flat, has_effect = config.flat(), late.configure.has_effect
    own = ("lr", *late.recipes.find_method(config.method).uses)
    keys = [key for key in own if key.startswith(only) and has_effect(key, config)]
    unset = {"refresh.samples": "all", "projection.alpha": "its own"}
    return "  ".join(f"{k}={unset.get(k, 'none') if flat[k] is None else flat[k]}" for k in keys)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[
        Path | None,
        option("FILE", "Default: report.html in the first folder. With .md, .tex or .csv: tables."),
    ] = None,
    watch: Annotated[bool, flag("--watch", "Keep it current while runs go on.")] = False,
) -> None:
    """Write one self-contained HTML page about all runs in the folders, or their tables."""
    page = out or folders[0] / "report.html"
    only_tables = page.suffix in late.tables.FORMATS
    if not only_tables and page.suffix not in (".html", ".htm"):
        endings = ", ".join([".html", *late.tables.FORMATS])
        raise InputError(f"--out {page}: its ending says what to write; give one of {endings}.")
    if watch and only_tables:
        raise InputError(f"--watch keeps a page current, but {page} is a file of tables.")
    if watch:
        say(terminal(), f"Keeping {page} current; Ctrl-C to stop.")
        late.watch.watch_report(folders, page)
        return
    summary = (late.page.write_tables if only_tables else late.page.write_report)(folders, page)
    for sentence in (*summary.verdict, *summary.serious):
        say(terminal(), sentence)
    counts = ", ".join(f"{count} {status}" for status, count in summary.statuses.items())
    say(terminal(), f"{summary.runs} run{'s' * (summary.runs != 1)} ({counts}): {page}")


def figure(
    name: Annotated[str, typer.Argument(help="Such as accuracy, tasks, time, appendix, figure-1.")],
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, option("DIR", "Where the pictures go.")] = Path("."),
    ending: Annotated[str, option("EXT", "png, pdf or svg.")] = "png",
) -> None:
    """Draw one figure from the runs in the folders, a picture for each stream and memory."""
    figures, endings = late.plots.FIGURES, late.plots.ENDINGS
    if name not in figures:
        raise InputError(f"unknown figure '{name}'; there are {', '.join(figures)}.")
    if ending not in endings:
        raise InputError(f"--ending {ending}: give one of {', '.join(endings)}.")
    study = late.grouping.read_some(folders)
    problems = [str(caution) for caution in late.findings.study_warnings(study)]
    if not study.sections:
        named = ", ".join(str(folder) for folder in folders)
        raise DataError(f"{named}: no run has anything to draw yet. {' '.join(problems)}")
    lacking: list[DataError] = []
    for section in study.sections:
        path = out / f"{name}-{section.slug}.{ending}"
        try:
            late.plots.save(figures[name](section), path)
            say(terminal(), path)
        except DataError as error:
            lacking.append(error)
    if len(lacking) == len(study.sections):
        raise lacking[0]
    for problem in (*problems, *lacking):
        say(terminal(stderr=True), problem)
    if lacking:
        raise typer.Exit(1)


COMMANDS = {
    benchmarks: "benchmarks --data-root data",
    methods: "methods --benchmark split-digits",
    settings: "settings lpr-er --benchmark split-digits",
    report: "report runs/compare-split-digits",
    figure: "figure accuracy runs/compare-split-digits --out pictures",
}
