"""Commands that make runs: demo, plan, run, resume, compare, sweep, reproduce."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Column, Table

from proxreplay.cli import late
from proxreplay.cli.options import (
    DEFAULT_METHOD,
    Benchmark,
    DataRoot,
    How,
    MethodName,
    Out,
    Settings,
    Trust,
    Where,
    flag,
    number,
    option,
    parse_grid,
    parse_methods,
    parse_seeds,
    refuse_foreign_code,
    spread,
)
from proxreplay.cli.text import plain, say, terminal
from proxreplay.errors import DataError, InputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from proxreplay.experiments.engines import Job
    from proxreplay.experiments.results import StoredRun

_SETTINGS, _HOW, _WHERE = Settings(), How(), Where()  # `spread` fills them from the command line
Seeds = Annotated[str, option("SEEDS", "Such as 0-4, or 0,2,5.")]


def demo(
    out: Annotated[Path, option("DIR", "Where everything is written.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=2, max=1000)] = 5,
) -> None:
    """Compare plain replay, LPR and LPR averaged on bundled digits: a table and a picture."""
    planned = late.jobs.comparison(late.demo.BENCHMARK, late.demo.METHOD_NAMES, range(seeds), out)
    make(planned)
    rows, explanation, written = late.demo.conclude(out, planned)
    print_table(f"{late.demo.BENCHMARK}, mean ± standard error over seeds", rows)
    tell_versions(planned)
    terminal().print(explanation)
    for what, where in written.items():
        say(terminal(), f"{what:9}{where}")


@spread
def run(
    benchmark: Annotated[str | None, typer.Argument(help="See: proxreplay benchmarks")] = None,
    method: MethodName = None,
    seed: Annotated[int | None, number("Of everything random. Default: 0", min=0)] = None,
    settings: Settings = _SETTINGS,
    how: How = _HOW,
    out: Out = None,
) -> None:
    """Make one run: one seed of one method on one benchmark. It may be killed and continued."""
    config = settings.resolve(benchmark, method, seed=seed)  # refuses before torch is imported
    folder = out or Path("runs") / config.benchmark / f"{config.method}-seed{config.seed}"
    make([late.engines.Job(config, folder, how.options())])
    print_result(folder)


@spread
def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one that holds several.")],
    how: How = _HOW,
    where: Where = _WHERE,
    trust: Trust = False,
) -> None:
    """Go on with whatever is unfinished in a folder; finished runs are only handed to trackers."""
    runs = late.results.find_runs([folder])
    if not runs:
        raise InputError(f"{folder}: no run here; a run folder holds a config.yaml.")
    planned, options, broken = [], how.options(), 0
    for stored in runs:
        problem = _unreadable(stored)
        if stored.config is None or problem:
            broken += 1
            say(terminal(stderr=True), f"{stored.folder}: {problem}", style="red")
        elif stored.status != "complete":
            refuse_foreign_code([stored.config], str(stored.folder), trust=trust)
            planned.append(late.engines.Job(stored.config, stored.folder, options))
        elif options.track and late.trackers.missing(stored.folder, options.track):
            planned.append(late.engines.Job(stored.config, stored.folder, options))
        elif options.track:
            say(terminal(stderr=True), f"{stored.folder}: complete, and so are its trackers")
        else:
            tell_missing(stored.folder)
    make(planned, where)
    if broken:
        say(terminal(stderr=True), f"{broken} of {len(runs)} run folders cannot be read.")
        raise typer.Exit(2 if broken == len(runs) else 1)
    if len(runs) == 1:
        print_result(runs[0].folder)
    else:
        say(terminal(), f"{len(runs)} runs complete; see: proxreplay report {folder}")


def _unreadable(stored: "StoredRun") -> str | None:
    """What is wrong with a run folder that can neither be resumed nor be relied on."""
    if stored.config is None:
        return stored.problem
    try:
        stored.check_records()
    except DataError as error:
        return str(error)
    return None


@spread
def compare(
    benchmark: Benchmark,
    methods: Annotated[str, typer.Option(help="Comma-separated; the first is the reference.")],
    seeds: Seeds = "0-4",
    settings: Settings = _SETTINGS,
    how: How = _HOW,
    where: Where = _WHERE,
    out: Out = None,
) -> None:
    """Make the runs of several methods with several seeds, and print one table."""
    names, numbers = parse_methods(methods), parse_seeds(seeds)
    study = out or Path("runs") / f"compare-{benchmark}"
    layers = settings.layers()
    planned = late.jobs.comparison(benchmark, names, numbers, study, *layers, options=how.options())
    settings.check([job.config for job in planned])
    make(planned, where)
    rows = late.tables.comparison_rows(late.results.read_run(job.folder) for job in planned)
    print_table(f"{benchmark}, mean ± standard error over seeds", rows)
    tell_versions(planned)
    say(terminal(), f"A page about it: proxreplay report {study}")


@spread
def sweep(
    benchmark: Benchmark,
    grid: Annotated[list[str], option("KEY=V1,V2", "Repeatable; or: --grid paper")],
    method: MethodName = None,
    seed: Annotated[int, number("The seed that selects.", min=0)] = 0,
    settings: Settings = _SETTINGS,
    how: How = _HOW,
    where: Where = _WHERE,
    out: Out = None,
) -> None:
    """Try a grid of settings and select by final validation accuracy; test data is not touched."""
    method = method or DEFAULT_METHOD
    folder = out or Path("runs") / f"sweep-{benchmark}-{method}"
    layers = settings.layers(seed=seed)
    selected: dict[str, Any] = {}
    planned = late.sweep.stages(method, parse_grid(grid))
    for stage in planned:
        further = (*layers, selected)
        points = late.jobs.grid_search(
            benchmark, stage.method, stage.grid, folder, *further, options=how.options()
        )
        if stage is planned[-1]:
            settings.check([point.config for point in points])
        late.configure.refuse_without_effect(stage.grid, [point.config for point in points])
        make(points, where)
        choices = late.sweep.ranked(points)
        print_choices(stage, choices)
        selected |= late.sweep.winner_values(choices[0], stage)
    best = folder / "best.yaml"
    late.sweep.write_winner(best, selected, choices[0], len(planned))
    say(terminal(), f"Selected settings: {best}")
    say(terminal(), f"Use them: proxreplay run {benchmark} --method {method} --config {best}")


@spread
def plan(
    benchmark: Benchmark,
    method: MethodName = None,
    settings: Settings = _SETTINGS,
    data_root: DataRoot = None,
) -> None:
    """Say what a run would do and how long it would take, after a short calibration."""
    config = settings.resolve(benchmark, method)  # refuses before torch is imported
    planned = late.plan.plan(config, data_root)
    title = f"{config.method} on {benchmark}, memory {config.capacity}, {config.threads} thread(s)"
    table = Table("What", "How much", title=plain(title), title_justify="left", show_header=False)
    for what, value in planned.described():
        table.add_row(what, value)
    terminal().print(table)


@spread
def reproduce(
    what: Annotated[
        str, typer.Argument(help="table1-3, unlimited, projections, sensitivity, figure1-2")
    ],
    rows: Annotated[str | None, option("METHODS", "Only these, comma-separated.")] = None,
    benchmark: Annotated[str | None, option("NAME", "Only this benchmark.")] = None,
    seeds: Annotated[str | None, option("SEEDS", "Such as 0-2; default: as the paper.")] = None,
    quick: Annotated[bool, flag("--quick", "A smaller protocol.")] = False,
    settings: Settings = _SETTINGS,
    how: How = _HOW,
    where: Where = _WHERE,
    out: Out = None,
) -> None:
    """Run what is missing of a table or figure of the paper; print ours beside the paper's."""
    wanted = late.reproduce.find_reproduction(what)
    selection = late.jobs.Selection(
        parse_methods(rows) if rows else None,
        settings.memory,
        benchmark,
        parse_seeds(seeds) if seeds else None,
        quick,
    )
    folder = out or Path("runs") / (f"{what}-quick" if quick else what)
    layers = dataclasses.replace(settings, memory=None).layers()  # memory selects rows here
    options = how.options()
    planned = late.jobs.reproduction(wanted.blocks, selection, folder, *layers, options=options)
    settings.check([job.config for job in planned])
    make(planned, where)
    text, beside = late.reproduce.conclude(wanted, folder, quick=quick)
    say(terminal(), text)
    print_beside(beside)
    say(terminal(), f"Written: {folder / 'tables.md'}")


def make(planned: "Sequence[Job]", where: Where = _WHERE) -> None:
    """Make runs with a display.

    Leave with 2 if all were refused, with 1 if one failed, with 128 + signal if interrupted.
    """
    engine, console = where.make_engine(), terminal(stderr=True)
    group = _process_group(planned, engine)
    asked = late.interrupt.stop_on_signals()
    shown = late.display.StudyDisplay(console, len(planned))
    # the group first: a signal ends a process that waits for the others
    with group, asked as stop, shown as display:
        outcomes = engine.make(planned, stop, display)
    for outcome in outcomes:
        if outcome.status == "complete":
            tell_missing(outcome.job.folder)
    done = sum(o.status == "complete" for o in outcomes)
    if done == len(planned):
        return
    if stop:
        say(console, f"Interrupted: {done} of {len(planned)} runs complete, the others saved.")
        say(console, "The same command again goes on where this one stopped.")
        raise typer.Exit(stop.exit_code)
    refused = {outcome.status for outcome in outcomes} == {"refused"}
    if len(planned) > 1 or outcomes[0].status == "interrupted":  # a single failure was said already
        say(console, f"{len(planned) - done} of {len(planned)} runs failed or were stopped:")
        for outcome in outcomes:
            if outcome.status != "complete":
                say(console, f"  {outcome.job.folder}: {outcome.problem}", style="red")
    raise typer.Exit(2 if refused else 1)


def _process_group(planned: "Sequence[Job]", engine: object) -> "AbstractContextManager[None]":
    """The process group of a command that torchrun has started."""
    if not planned:
        return nullcontext()
    one_here = len(planned) == 1 and isinstance(engine, late.engines.InlineEngine)
    if late.joint.started_together() and not one_here:
        raise InputError(
            f"{len(planned)} runs in processes that torchrun started; these make one run together: "
            "use run, or resume one folder, without --jobs and --engine."
        )
    return late.joint.process_group(planned[0].config.device)


def tell_missing(folder: Path) -> None:
    """Say which trackers of a complete run do not have all of its records."""
    for name in late.trackers.missing(folder):
        words = f"{name} misses records; hand them over with: proxreplay resume {folder}"
        say(terminal(stderr=True), f"{folder}: {words} --track {name}")


def print_table(title: str, rows: Sequence[Any]) -> None:
    """A comparison as a table on the terminal."""
    headings = [Column(measure.label, no_wrap=True) for measure in late.measures.MAIN]
    table = Table("Method", "Seeds", *headings, title=plain(title), title_justify="left", padding=0)
    for row in rows:
        paired = row.source == "difference"
        cells = [late.tables.format_estimate(e, signed=paired) for e in row.estimates]
        style = "bold" if paired and row.seeds >= late.tables.FEW_SEEDS else None
        table.add_row(plain(row.label), str(row.seeds), *cells, style=style)
    terminal().print(table)


def tell_versions(planned: "Sequence[Job]") -> None:
    """Say, under a table, if its runs were made with different source codes."""
    codes = (late.results.read_environment(job.folder)[0] for job in planned)
    said = late.tables.several_codes(codes)
    if said:
        say(terminal(), said)


def print_result(folder: Path) -> None:
    """What a finished run amounts to."""
    result = late.results.read_run(folder).result
    if result is not None:
        values = {measure.label: result.measures[measure.key] for measure in late.measures.MAIN}
        numbers = "   ".join(f"{k} {v:.4f}" for k, v in values.items() if v is not None)
        say(terminal(), f"{numbers}   ({folder})")


def print_choices(stage: Any, choices: Sequence[Any]) -> None:
    """What was tried in a stage of a sweep, best first."""
    if not choices:
        raise InputError("sweep: no run is complete; nothing can be selected.")
    table = Table(*stage.grid, "validation accuracy", title=stage.method, title_justify="left")
    for place, choice in enumerate(choices):
        cells = [plain(value) for value in late.sweep.winner_values(choice, stage).values()]
        table.add_row(*cells, f"{choice.validation_acc:.4f}", style="bold" if place == 0 else None)
    terminal().print(table)


def print_beside(beside: Sequence[Any]) -> None:
    """Our numbers beside the paper's, and how many standard errors lie between."""
    if not beside:
        return
    table = Table("Row", "Measure", "Ours", "Paper", "Standard errors", box=box.SIMPLE_HEAD)
    for one in beside:
        numbers = (late.tables.format_estimate(one.ours), late.tables.format_estimate(one.paper))
        table.add_row(plain(one.row), one.measure, *numbers, f"{one.standard_errors:+.1f}")
    terminal().print(table)


COMMANDS = {
    demo: "demo --out runs/demo",
    plan: "plan split-cifar100 --method lpr-er --eval-every 10",
    run: "run split-digits --method lpr-er --set lpr.omega_0=4",
    resume: "resume runs/split-digits/lpr-er-seed0",
    compare: "compare split-digits --methods er,lpr-er --seeds 0-4 --jobs 2",
    sweep: "sweep split-digits --grid lr=0.05,0.1 --grid lpr.omega_0=1,4",
    reproduce: "reproduce table1 --rows er,lpr-er --memory 2000 --seeds 0-2",
}
