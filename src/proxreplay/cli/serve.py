"""The command that serves a learner: serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxreplay.cli.options import flag, number, option
from proxreplay.errors import InputError
from proxreplay.options import DurableOptions, GuardOptions, ServeOptions

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner


def serve(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a durable learner; a new one needs --learner.")
    ],
    learner: Annotated[
        str | None,
        option(
            "WHAT",
            "What a new folder starts with: a saved learner, or code that makes one, "
            "file.py:function or package.module:function. Code is executed.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback need tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    read_token: Annotated[
        Path | None, option("FILE", "Holds the token for reading. Or PROXREPLAY_READ_TOKEN.")
    ] = None,
    write_token: Annotated[
        Path | None, option("FILE", "Holds the token for changing. Or PROXREPLAY_WRITE_TOKEN.")
    ] = None,
    read_only: Annotated[
        bool, flag("--read-only", "Follow the snapshots of another process.")
    ] = False,
    snapshot_every: Annotated[
        int, number("Events between snapshots.")
    ] = DurableOptions.snapshot_every,
    keep_snapshots: Annotated[
        int, number("Snapshots to go back to.", min=2)
    ] = DurableOptions.keep_snapshots,
    keep_events: Annotated[int, number("Events to go back to.")] = DurableOptions.keep_events,
    keep_days: Annotated[
        float | None, option("DAYS", "Drop older snapshots and events.", min=0)
    ] = DurableOptions.keep_days,
    keep_bytes: Annotated[
        int | None, option("BYTES", "Of snapshots and events together.", min=1)
    ] = DurableOptions.keep_bytes,
    queue: Annotated[int, number("Events that may wait; then 429.")] = DurableOptions.queue_events,
    body: Annotated[
        int, option("BYTES", "Largest body; then 413.", min=1)
    ] = ServeOptions.body_bytes,
    guard: Annotated[
        str | None, option("DO", "What to do when something is wrong: stop or rollback.")
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Guard: least prequential accuracy.", min=0, max=1)
    ] = None,
    recall: Annotated[
        list[str] | None, option("LABEL=LEAST", "Guard: least recall of a label; repeatable.")
    ] = None,
    window: Annotated[int, number("Guard: examples looked at.")] = GuardOptions.window,
    threads: Annotated[int, typer.Option(min=1, help="Of torch; decides the last bits.")] = 1,
) -> None:
    """Serve a learner: predict at every moment, learn on the side, never lose what was learned."""
    options = DurableOptions(
        snapshot_every=snapshot_every,
        keep_snapshots=keep_snapshots,
        keep_events=keep_events,
        keep_days=keep_days,
        keep_bytes=keep_bytes,
        queue_events=queue,
    )
    watched = _guard(guard, accuracy, recall, window)
    try:
        from proxreplay.serving.access import READ, WRITE, Access, token_from
        from proxreplay.serving.server import listen, run
        from proxreplay.serving.service import Service
    except ImportError as error:
        raise InputError(
            f"{error}; install what serving needs: pip install proxreplay[serve]"
        ) from (error)
    import torch

    from proxreplay.serving import DurableLearner, Follower

    torch.set_num_threads(threads)
    limits = ServeOptions(body_bytes=body)
    access = Access(token_from(READ, read_token), token_from(WRITE, write_token), host)
    start = None if learner is None else _learner(learner)
    source: DurableLearner | Follower
    with listen(host, port, limits.connections) as listening:
        if read_only:
            source = Follower.open(folder) if start is None else Follower(folder, start)
        elif start is None:
            source = DurableLearner.open(folder, options=options, guard=watched)
        else:
            source = DurableLearner(folder, start, options=options, guard=watched)
        run(Service(source, limits), access, listening)


def _guard(
    action: str | None, accuracy: float | None, recall: list[str] | None, window: int
) -> GuardOptions | None:
    if action is None:
        if accuracy is not None or recall or window != GuardOptions.window:
            raise InputError("--accuracy, --recall and --window need --guard stop or rollback.")
        return None
    bounds = []
    for text in recall or []:
        label, equals, least = text.rpartition("=")
        try:
            bounds.append((label, float(least)))
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"--recall {text}: give LABEL=LEAST, such as --recall cat=0.5.")
    return GuardOptions(action, accuracy=accuracy, recall=tuple(bounds), window=window)


def _learner(what: str) -> "Learner":
    """A saved learner, or what code that is named on this command line makes."""
    from proxreplay.models.networks import import_name
    from proxreplay.replay.learner import Learner

    path = Path(what)
    if path.exists():
        return Learner.load(path)
    made: Any = import_name(what, "learner")()
    if not isinstance(made, Learner):
        raise InputError(f"--learner {what} returned {type(made).__name__}; return a Learner.")
    return made


COMMANDS = {serve: "serve digits --learner examples/serve/learner.py:make"}
