"""The command line: parse, call, print."""

import signal
import sys
from typing import Annotated

import typer

from proxreplay import __version__
from proxreplay.allocator import keep_freed_memory
from proxreplay.cli import data, info, runs, serve
from proxreplay.cli.text import plain
from proxreplay.errors import ProxreplayError

app = typer.Typer(
    help="Learn from a stream without wrecking what is already known.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 done, 1 a run failed, 2 nothing was done because of what was given.",
)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Online continual learning with Layerwise Proximal Replay."""
    if version:
        typer.echo(f"proxreplay {__version__}")
        raise typer.Exit


for group in (runs, serve, info):
    for command, example in group.COMMANDS.items():
        app.command(epilog=f"Example: proxreplay {example}")(command)
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point of the ``proxreplay`` command.

    A user's mistake, and a file that cannot be read or written, is one line and exit code 2
    (docs/guides/experiments.md has all codes).
    """
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(128 + number))
    keep_freed_memory()
    try:
        app()
    except (ProxreplayError, OSError) as error:
        if "--debug" in sys.argv or isinstance(error, BrokenPipeError):
            raise
        named = isinstance(error, OSError) and error.filename is not None
        at = f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[union-attr]
        typer.secho(plain(f"proxreplay: {at}"), fg="red", err=True)
        sys.exit(2)
