"""The command line: parse, call, print."""

from pathlib import Path
from typing import Annotated

import typer

from proxreplay import __version__
from proxreplay.batch import Batch
from proxreplay.errors import ProxreplayError

app = typer.Typer(
    help="Learn from a stream without wrecking what is already known.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Online continual learning with Layerwise Proximal Replay."""
    if version:
        typer.echo(f"proxreplay {__version__}")
        raise typer.Exit


@app.command(epilog="Example: proxreplay demo --out runs/demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for records, table and picture.")] = Path(
        "runs/demo"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=2)] = 5,
) -> None:
    """Compare plain replay with LPR on bundled digits: a table and a picture in under a minute."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from proxreplay.demo import METHODS, run_demo
    from proxreplay.experiments.methods import label
    from proxreplay.report.tables import MEASURES, format_estimate

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bars = {m: progress.add_task(f"{label(m):9}", total=None) for m in METHODS}

        def on_batch(method: str, seed: int, batch: Batch, total: int) -> None:
            progress.update(
                bars[method],
                description=f"{label(method):9} seed {seed}",
                total=seeds * total,
                advance=1,
            )

        result = run_demo(out, range(seeds), on_batch)

    title = f"split-digits, mean ± standard error over {seeds} seeds"
    table = Table("Method", *MEASURES.values(), title=title, title_justify="left")
    for row in result.rows:
        paired = row.label == "difference"
        cells = [format_estimate(e, signed=paired) for e in row.estimates]
        table.add_row(row.label, *cells, style="bold" if paired else None)
    console.print(table)
    console.print(result.explanation, highlight=False)
    console.print(f"\nPicture  {result.picture}", highlight=False, soft_wrap=True)
    console.print(f"Table    {result.table}", highlight=False, soft_wrap=True)
    console.print(f"Records  {out / 'runs'}", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of the ``proxreplay`` command: a user's mistake is one line and exit code 2."""
    try:
        app()
    except ProxreplayError as error:
        typer.secho(f"proxreplay: {error}", fg="red", err=True)
        raise SystemExit(2) from None
