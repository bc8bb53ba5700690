"""Commands that make runs: demo, run, resume, compare, sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from proxreplay.errors import InputError

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for everything that is written.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(metavar="DIR", envvar="PROXREPLAY_DATA", help="Where the data sets are."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable."),
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Settings, such as another run's config.yaml.")
]
Data = Annotated[
    str | None, typer.Option(metavar="PATH", help="custom: a folder, zip or .npz of your own.")
]
Tasks = Annotated[int | None, typer.Option(metavar="N", help="Tasks to split it into.", min=1)]
Memory = Annotated[int | None, typer.Option(metavar="N", help="Examples remembered.", min=1)]
EvalEvery = Annotated[
    int | None, typer.Option(metavar="N", help="Batches between evaluations.", min=1)
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads of a run.", min=1)]
Jobs = Annotated[int, typer.Option(metavar="N", help="Runs at a time.", min=1)]
CheckpointEvery = Annotated[
    int, typer.Option(metavar="N", help="Batches between checkpoints.", min=1)
]
Track = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="tensorboard, wandb, mlflow; repeatable.")
]
MethodName = Annotated[
    str | None, typer.Option(metavar="NAME", help="See: proxreplay methods  (lpr-er)")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Of everything random.", min=0)]
Seeds = Annotated[str, typer.Option(metavar="SEEDS", help="Such as 0-4, or 0,2,5.")]


def demo(
    out: Out = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=2)] = 5,
) -> None:
    """Compare plain replay with LPR on bundled digits: a table and a picture in under a minute."""
    from rich.console import Console

    from proxreplay.demo import BENCHMARK, METHOD_NAMES, conclude
    from proxreplay.experiments.jobs import comparison

    console = Console()
    planned = comparison(BENCHMARK, METHOD_NAMES, range(seeds), out)
    make(planned, jobs=1)
    result = conclude(out, planned)
    print_table(console, "split-digits, mean ± standard error over seeds", result.rows)
    console.print(result.explanation, highlight=False)
    for what, where in result.written.items():
        console.print(f"{what:9}{where}", highlight=False, soft_wrap=True)


def run(
    benchmark: Annotated[str | None, typer.Argument(help="See: proxreplay benchmarks")] = None,
    method: MethodName = None,
    seed: Seed = None,
    memory: Memory = None,
    eval_every: EvalEvery = None,
    threads: Threads = None,
    data: Data = None,
    tasks: Tasks = None,
    sets: Sets = None,
    config: Config = None,
    data_root: DataRoot = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder.")] = None,
    checkpoint_every: CheckpointEvery = 100,
    track: Track = None,
) -> None:
    """Make one run: one seed of one method on one benchmark. It may be killed and continued."""
    from rich.console import Console

    from proxreplay.experiments.engines import Job

    given = chosen(data, tasks, seed=seed, capacity=memory, eval_every=eval_every, threads=threads)
    resolved = resolve(benchmark, method, config, given, sets)
    name = f"{resolved.method}-seed{resolved.seed}"
    folder = out or Path("runs") / resolved.benchmark / name
    make([Job(resolved, folder, how(data_root, checkpoint_every, track))], jobs=1)
    print_result(Console(), folder)


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one that holds several.")],
    data_root: DataRoot = None,
    jobs: Jobs = 1,
    checkpoint_every: CheckpointEvery = 100,
    track: Track = None,
) -> None:
    """Go on with whatever is unfinished in a folder; finished runs are left alone."""
    from proxreplay.experiments.engines import Job
    from proxreplay.experiments.results import find_runs

    runs = find_runs([folder])
    if not runs:
        raise InputError(f"{folder}: no run here; a run folder holds a config.yaml.")
    options = how(data_root, checkpoint_every, track)
    make([Job(r.config, r.folder, options) for r in runs if r.config is not None], jobs)


def compare(
    benchmark: Annotated[str, typer.Argument(help="See: proxreplay benchmarks")],
    methods: Annotated[str, typer.Option(help="Comma-separated; the first is the reference.")],
    seeds: Seeds = "0-4",
    memory: Memory = None,
    eval_every: EvalEvery = None,
    jobs: Jobs = 1,
    threads: Threads = None,
    data: Data = None,
    tasks: Tasks = None,
    sets: Sets = None,
    config: Config = None,
    data_root: DataRoot = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study.")] = None,
    checkpoint_every: CheckpointEvery = 100,
    track: Track = None,
) -> None:
    """Make the runs of several methods with several seeds, and print one table."""
    from rich.console import Console

    from proxreplay.experiments.jobs import comparison
    from proxreplay.experiments.recipes import find_method
    from proxreplay.experiments.results import read_run
    from proxreplay.report.tables import comparison_rows

    given = chosen(data, tasks, capacity=memory, eval_every=eval_every, threads=threads)
    names, numbers = [find_method(m).name for m in methods.split(",")], parse_seeds(seeds)
    study = out or Path("runs") / f"compare-{benchmark}"
    layers = (read_values(config), given, parse_sets(sets))
    options = how(data_root, checkpoint_every, track)
    planned = comparison(benchmark, names, numbers, study, *layers, options=options)
    make(planned, jobs)
    runs = {
        find_method(name).label: [read_run(j.folder) for j in planned if j.config.method == name]
        for name in names
    }
    title = f"{benchmark}, mean ± standard error over seeds"
    print_table(Console(), title, comparison_rows(runs))
    typer.echo(f"A page about it: proxreplay report {study}")


def sweep(
    benchmark: Annotated[str, typer.Argument(help="See: proxreplay benchmarks")],
    grid: Annotated[
        list[str], typer.Option(metavar="KEY=V1,V2", help="Repeatable; or: --grid paper")
    ],
    method: Annotated[str, typer.Option(metavar="NAME", help="See: proxreplay methods")] = "lpr-er",
    seed: Annotated[int, typer.Option(metavar="N", help="The seed that selects.", min=0)] = 0,
    memory: Memory = None,
    eval_every: EvalEvery = None,
    jobs: Jobs = 1,
    threads: Threads = None,
    data: Data = None,
    tasks: Tasks = None,
    sets: Sets = None,
    config: Config = None,
    data_root: DataRoot = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the sweep.")] = None,
    checkpoint_every: CheckpointEvery = 100,
    track: Track = None,
) -> None:
    """Try a grid of settings and select by final validation accuracy; test data is not touched."""
    from rich.console import Console

    from proxreplay.experiments.jobs import grid_search
    from proxreplay.experiments.sweep import ranked, stages, winner_values, write_winner

    given = chosen(data, tasks, seed=seed, capacity=memory, eval_every=eval_every, threads=threads)
    folder = out or Path("runs") / f"sweep-{benchmark}-{method}"
    layers = [read_values(config), given, parse_sets(sets)]
    options = how(data_root, checkpoint_every, track)
    selected: dict[str, Any] = {}
    planned = stages(method, parse_grid(grid))
    for stage in planned:
        points = grid_search(
            benchmark, stage.method, stage.grid, folder, *layers, selected, options=options
        )
        make(points, jobs)
        choices = ranked(points)
        print_choices(Console(), stage, choices)
        selected |= winner_values(choices[0], stage)
    best = folder / "best.yaml"
    write_winner(best, selected, choices[0], len(planned))
    typer.echo(f"Selected settings: {best}")
    typer.echo(f"Use them: proxreplay run {benchmark} --method {method} --config {best}")


def plan(
    benchmark: Annotated[str, typer.Argument(help="See: proxreplay benchmarks")],
    method: MethodName = None,
    memory: Memory = None,
    eval_every: EvalEvery = None,
    threads: Threads = None,
    data: Data = None,
    tasks: Tasks = None,
    sets: Sets = None,
    config: Config = None,
    data_root: DataRoot = None,
) -> None:
    """Say what a run would do and how long it would take, after a short calibration."""
    from rich.console import Console
    from rich.table import Table

    from proxreplay.experiments.plan import plan as make_plan

    given = chosen(data, tasks, capacity=memory, eval_every=eval_every, threads=threads)
    resolved = resolve(benchmark, method, config, given, sets)
    planned = make_plan(resolved, data_root)
    title = f"{resolved.method} on {benchmark}, memory {resolved.capacity}"
    title += f", {resolved.threads} thread(s)"
    table = Table("What", "How much", title=title, title_justify="left", show_header=False)
    for what, value in planned.described():
        table.add_row(what, value)
    Console().print(table)


def resolve(
    benchmark: str | None,
    method: str | None,
    config: Path | None,
    given: dict[str, Any],
    sets: list[str] | None,
) -> Any:
    """The configuration of one run; benchmark and method may come from the file."""
    from proxreplay.experiments.configure import configure

    values = read_values(config)
    benchmark = benchmark or values.get("benchmark")
    if benchmark is None:
        raise InputError("run: which benchmark? Name one (see: proxreplay benchmarks) or --config.")
    method = method or values.get("method", "lpr-er")
    return configure(benchmark, method, values, given, parse_sets(sets))


def how(data_root: Path | None, checkpoint_every: int, track: list[str] | None) -> Any:
    """How runs are made; none of it changes what they compute."""
    from proxreplay.experiments.run import RunOptions

    return RunOptions(data_root, checkpoint_every, tuple(track or ()))


def chosen(data: str | None, tasks: int | None, **options: Any) -> dict[str, Any]:
    """The options that were given, as configuration values."""
    options |= {"stream.data": data, "stream.tasks": tasks}
    return {key: value for key, value in options.items() if value is not None}


def reproduce(
    what: Annotated[
        str, typer.Argument(help="table1-3, unlimited, projections, sensitivity, figure1-2")
    ],
    rows: Annotated[
        str | None, typer.Option(metavar="METHODS", help="Only these, comma-separated.")
    ] = None,
    memory: Memory = None,
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this benchmark.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="SEEDS", help="Such as 0-2; default: as the paper.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller protocol.")] = False,
    eval_every: EvalEvery = None,
    jobs: Jobs = 1,
    threads: Threads = None,
    sets: Sets = None,
    data_root: DataRoot = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study.")] = None,
    checkpoint_every: CheckpointEvery = 100,
) -> None:
    """Run what is missing of a table or figure of the paper; print ours beside the paper's."""
    from rich.console import Console

    from proxreplay.experiments.jobs import Selection, reproduction
    from proxreplay.reproduce import conclude, find_reproduction

    wanted = find_reproduction(what)
    selection = Selection(
        rows.split(",") if rows else None,
        memory,
        benchmark,
        parse_seeds(seeds) if seeds else None,
        quick,
    )
    folder = out or Path("runs") / (f"{what}-quick" if quick else what)
    given = chosen(None, None, eval_every=eval_every, threads=threads)
    options = how(data_root, checkpoint_every, None)
    layers = (given, parse_sets(sets))
    planned = reproduction(wanted.blocks, selection, folder, *layers, options=options)
    make(planned, jobs)
    text, beside = conclude(wanted, folder, quick=quick)
    console = Console()
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    print_beside(console, beside)
    console.print(f"Written: {folder / 'tables.md'}", highlight=False, soft_wrap=True)


def print_beside(console: Any, beside: Sequence[Any]) -> None:
    """Our numbers beside the paper's, and how many standard errors lie between."""
    from rich import box
    from rich.table import Table

    from proxreplay.report.tables import format_estimate

    if not beside:
        return
    table = Table("Row", "Measure", "Ours", "Paper", "Standard errors", box=box.SIMPLE_HEAD)
    for one in beside:
        numbers = (format_estimate(one.ours), format_estimate(one.paper))
        table.add_row(one.row, one.measure, *numbers, f"{one.standard_errors:+.1f}")
    console.print(table)


def make(planned: Sequence[Any], jobs: int) -> None:
    """Make runs with a display; leave with 1 if one failed, with 128 + signal if interrupted."""
    from rich.console import Console

    from proxreplay.cli.display import StudyDisplay
    from proxreplay.experiments.engines import Engine, InlineEngine, ProcessEngine
    from proxreplay.experiments.interrupt import stop_on_signals

    console = Console(stderr=True)
    engine: Engine = InlineEngine() if jobs == 1 else ProcessEngine(jobs)
    with stop_on_signals() as stop, StudyDisplay(console, len(planned)) as display:
        outcomes = engine.make(planned, stop, display.on_progress, display.on_outcome)
    failed = [o for o in outcomes if o.status == "failed"]
    done = sum(o.status == "complete" for o in outcomes)
    if stop and done < len(planned):
        console.print(f"Interrupted: {done} of {len(planned)} runs complete, the others saved.")
        console.print("The same command again goes on where this one stopped.")
        raise typer.Exit(stop.exit_code)
    if failed and len(planned) == 1:  # said already
        raise typer.Exit(1)
    if failed:
        console.print(f"{len(failed)} of {len(planned)} runs failed:", style="red")
        for outcome in failed:
            text = f"  {outcome.job.folder}: {outcome.problem}"
            console.print(text, markup=False, soft_wrap=True)
        raise typer.Exit(1)


def print_table(console: Any, title: str, rows: Sequence[Any]) -> None:
    """A comparison as a table on the terminal."""
    from rich.table import Table

    from proxreplay.evaluation.measures import MAIN
    from proxreplay.report.tables import FEW_SEEDS, format_estimate

    table = Table("Method", "Seeds", *(m.label for m in MAIN), title=title, title_justify="left")
    for row in rows:
        paired = row.source == "difference"
        cells = [format_estimate(e, signed=paired) for e in row.estimates]
        style = "bold" if paired and row.seeds >= FEW_SEEDS else None
        table.add_row(row.label, str(row.seeds), *cells, style=style)
    console.print(table)


def print_result(console: Any, folder: Path) -> None:
    """What a finished run amounts to."""
    from proxreplay.evaluation.measures import MAIN
    from proxreplay.experiments.results import read_run

    result = read_run(folder).result
    if result is not None:
        values = {m.label: result.measures[m.key] for m in MAIN}
        numbers = "   ".join(f"{k} {v:.4f}" for k, v in values.items() if v is not None)
        console.print(f"{numbers}   ({folder})", highlight=False, soft_wrap=True)


def print_choices(console: Any, stage: Any, choices: Sequence[Any]) -> None:
    """What was tried in a stage of a sweep, best first."""
    from rich.table import Table

    from proxreplay.experiments.sweep import winner_values

    if not choices:
        raise InputError("sweep: no run is complete; nothing can be selected.")
    table = Table(*stage.grid, "validation accuracy", title=stage.method, title_justify="left")
    for place, choice in enumerate(choices):
        cells = [str(value) for value in winner_values(choice, stage).values()]
        table.add_row(*cells, f"{choice.validation_acc:.4f}", style="bold" if place == 0 else None)
    console.print(table)


def parse_grid(texts: list[str]) -> dict[str, list[Any]] | None:
    """``["lr=0.01,0.1"]`` as ``{"lr": [0.01, 0.1]}``; ``["paper"]`` as None."""
    import yaml

    if texts == ["paper"]:
        return None
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise InputError(f"--grid {text}: give KEY=V1,V2 or, alone, --grid paper.")
        grid[key.strip()] = [yaml.safe_load(value) for value in values.split(",")]
    return grid


def read_values(path: Path | None) -> dict[str, Any]:
    """The settings in a YAML file."""
    import yaml

    if path is None:
        return {}
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: holds no settings; give a mapping of keys to values.")
    return values


def parse_sets(sets: list[str] | None) -> dict[str, Any]:
    """``["lpr.omega_0=4"]`` as ``{"lpr.omega_0": 4}``."""
    import yaml

    values = {}
    for text in sets or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: give KEY=VALUE, such as --set lpr.omega_0=4.")
        values[key.strip()] = yaml.safe_load(value)
    return values


def parse_seeds(text: str) -> list[int]:
    """Seeds such as ``0-4`` or ``0,2,5-7``.

    >>> parse_seeds("0,2,5-7")
    [0, 2, 5, 6, 7]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise InputError(f"--seeds {text}: give numbers and ranges, such as 0-4 or 0,2,5.")
        seeds += range(int(first), int(last or first) + 1)
    if len(set(seeds)) != len(seeds) or not seeds:
        raise InputError(f"--seeds {text}: give each seed once, at least one.")
    return seeds


COMMANDS = (demo, plan, run, resume, compare, sweep, reproduce)
EXAMPLES = {
    "demo": "Example: proxreplay demo --out runs/demo",
    "run": "Example: proxreplay run split-digits --method lpr-er --set lpr.omega_0=4",
    "resume": "Example: proxreplay resume runs/split-digits/lpr-er-seed0",
    "reproduce": "Example: proxreplay reproduce table1 --rows er,lpr-er --memory 2000 --seeds 0-2",
    "plan": "Example: proxreplay plan split-cifar100 --method lpr-er --eval-every 10",
    "sweep": "Example: proxreplay sweep split-digits --grid lr=0.05,0.1 --grid lpr.omega_0=1,4",
    "compare": "Example: proxreplay compare split-digits --methods er,lpr-er --seeds 0-4 --jobs 2",
}
