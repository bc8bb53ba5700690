"""Commands about data: fetch what is missing, check what is there."""

from typing import Annotated

import typer

from proxreplay.cli.options import DataRoot

app = typer.Typer(
    help="Get data sets and see what is there.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(epilog="Example: proxreplay data fetch cifar100 --data-root data")
def fetch(
    name: Annotated[str, typer.Argument(help="See: proxreplay data check")],
    data_root: DataRoot = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Another source of the same files.")
    ] = None,
) -> None:
    """Download a data set; interrupted downloads go on, and only the published file is kept."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    from proxreplay.data.fetch import fetch as fetch_data

    console = Console()
    columns = (TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bar:

        def progress(file: str, done: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = bar.add_task(file, total=total)
            bar.update(bars[file], completed=done, total=total)

        paths = fetch_data(name, data_root, mirror=mirror, progress=progress)
    for path in paths:
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: proxreplay data check --full")
def check(
    data_root: DataRoot = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read everything, compare checksums.")
    ] = False,
) -> None:
    """Say for every data set what is there, where it was looked for, and how to get it."""
    from rich.console import Console

    from proxreplay.data.catalog import check as check_data

    console = Console(highlight=False, soft_wrap=True)
    broken = False
    for data in check_data(data_root, full=full):
        if data.found:
            where = data.source or "bundled"
            console.print(f"[green]✓[/] [bold]{data.name}[/]  {data.about}\n    there: {where}")
            if data.cache is not None:
                console.print(f"    decoded: {data.cache}")
        else:
            console.print(f"[yellow]-[/] [bold]{data.name}[/]  {data.about}")
            console.print("    looked for: " + ", ".join(str(p) for p in data.looked_for))
            console.print(f"    to get it: {data.way_out}")
        for remark in data.remarks:
            console.print(f"    note: {remark}")
        for problem in data.problems:
            broken = True
            console.print(f"    [red]problem:[/] {problem}")
    if broken:
        raise typer.Exit(1)
