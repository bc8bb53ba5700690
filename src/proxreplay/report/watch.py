"""A report that is kept current while runs go on."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from proxreplay.experiments.results import find_runs, fingerprint
from proxreplay.options import positive
from proxreplay.report.grouping import Cache
from proxreplay.report.page import ReportSummary, write_report


def watch_report(
    folders: Sequence[Path],
    out: Path,
    *,
    interval: float = 5.0,
    stop: threading.Event | None = None,
    on_write: Callable[[ReportSummary], None] = lambda summary: None,
) -> None:
    """Rewrite the page whenever a run changed, until ``stop`` is set or the process interrupted.

    The page reloads itself while runs are unfinished. Each version replaces the last one as a
    whole, so a browser never sees half of it. Folders without runs yet are waited for.
    """
    positive(interval=interval)
    stop = threading.Event() if stop is None else stop
    cache: Cache = {}
    last: object = None
    while True:
        there = [folder for folder in folders if folder.is_dir()]
        state = [(run.folder, fingerprint(run.folder)) for run in find_runs(there)]
        if state and state != last:
            last = state
            reload_seconds = max(5, round(interval))
            on_write(write_report(there, out, reload_seconds=reload_seconds, cache=cache))
        if stop.wait(interval):
            return
