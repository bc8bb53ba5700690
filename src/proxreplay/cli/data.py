"""Commands about data: fetch what is missing, check what is there."""

from typing import Annotated

import typer

from proxreplay.cli import late
from proxreplay.cli.options import DataRoot, flag, option

app = typer.Typer(
    help="Get data sets and see what is there.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(epilog="Example: proxreplay data fetch cifar100 --data-root data")
def fetch(
    name: Annotated[str, typer.Argument(help="See: proxreplay data check")],
    data_root: DataRoot = None,
    mirror: Annotated[str | None, option("URL", "Another source of the same files.")] = None,
) -> None:
    """Download a data set; interrupted downloads go on, and only the published file is kept."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console()
    columns = (TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bar:

        def progress(file: str, done: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = bar.add_task(file, total=total)
            bar.update(bars[file], completed=done, total=total)

        paths = late.fetch.fetch(name, data_root, mirror=mirror, progress=progress)
    for path in paths:
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True, markup=False)


@app.command(epilog="Example: proxreplay data check --full")
def check(
    data_root: DataRoot = None,
    full: Annotated[bool, flag("--full", "Read everything, compare checksums.")] = False,
) -> None:
    """Say for every data set what is there, where it was looked for, and how to get it."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    broken = False
    for data in late.catalog.check(data_root, full=full):
        mark = "[green]✓[/]" if data.found else "[yellow]-[/]"
        console.print(f"{mark} [bold]{data.name}[/]  {data.about}")
        lines = []
        if data.found:
            lines.append(f"there: {data.source or 'bundled'}")
            if data.cache is not None:
                lines.append(f"decoded: {data.cache}")
        else:
            lines.append("looked for: " + ", ".join(str(p) for p in data.looked_for))
            lines.append(f"to get it: {data.way_out}")
        lines += [f"note: {remark}" for remark in data.remarks]
        lines += [f"problem: {problem}" for problem in data.problems]
        for line in lines:  # paths may hold brackets, so no markup
            console.print(f"    {line}", markup=False)
        broken |= bool(data.problems)
    if broken:
        raise typer.Exit(1)
