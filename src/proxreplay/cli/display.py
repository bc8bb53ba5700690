"""What a person sees while runs go on."""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from proxreplay.cli.text import plain, say
from proxreplay.experiments.engines import Audience, Job, Outcome
from proxreplay.experiments.run import RunProgress

SECONDS_BETWEEN_LINES = 30.0


class StudyDisplay(Audience):
    """A line for the study and one for every run at work; plain lines without a terminal."""

    def __init__(
        self, console: Console, runs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("runs", total=runs, note="")
        self._lines: dict[Job, TaskID] = {}
        self._shares: dict[Job, float] = {}
        self._first: dict[Job, tuple[float, int]] = {}
        self._told: dict[Job, float] = {}
        self._done = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_progress(self, job: Job, at: RunProgress) -> None:
        """A run has done another batch."""
        now = self._clock()
        if job not in self._lines:
            name = f"  {plain(job.folder.name)}"
            self._lines[job] = self._progress.add_task(name, total=at.total, note="")
            self._first[job] = (now, at.position)
        start, position = self._first[job]
        note = f"task {at.task + 1}/{at.tasks}"
        if now > start and at.position > position:
            note += f"  {(at.position - position) / (now - start):.1f} batches/s"
        if at.accuracy is not None:
            note += f"  accuracy {at.accuracy:.3f}"
        self._progress.update(self._lines[job], completed=at.position, note=note)
        self._shares[job] = at.position / max(at.total, 1)
        self._progress.update(self._all, completed=self._done + sum(self._shares.values()))
        if not self.console.is_terminal and (
            job not in self._told or now - self._told[job] >= SECONDS_BETWEEN_LINES
        ):
            self._told[job] = now
            say(self.console, f"{job.folder}: batch {at.position}/{at.total}  {note}")

    def on_outcome(self, outcome: Outcome) -> None:
        """A run is over."""
        if outcome.job in self._lines:
            self._progress.remove_task(self._lines.pop(outcome.job))
        self._shares.pop(outcome.job, None)
        self._done += 1
        self._progress.update(self._all, completed=self._done)
        if outcome.status in ("refused", "failed"):
            say(self.console, f"{outcome.job.folder}: {outcome.problem}", style="red")
        elif not self.console.is_terminal:
            say(self.console, f"{outcome.job.folder}: {outcome.status}")
