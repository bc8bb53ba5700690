"""What a person sees while runs go on."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from proxreplay.experiments.engines import Job, Outcome
from proxreplay.experiments.run import Progress as RunProgress


class StudyDisplay:
    """One line for the study and one for every run at work; plain lines where there is no terminal.

    Args:
        console: where to.
        runs: how many runs there will be.
    """

    def __init__(self, console: Console, runs: int) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._all = self._progress.add_task("runs", total=runs, note="")
        self._lines: dict[Job, TaskID] = {}
        self._first: dict[Job, tuple[float, int]] = {}
        self._weight: float = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def on_progress(self, job: Job, at: RunProgress) -> None:
        """A run has done another batch."""
        if job not in self._lines:
            name = f"  {job.folder.name}"
            self._lines[job] = self._progress.add_task(name, total=at.total, note="")
            self._first[job] = (time.monotonic(), at.position)
        start, position = self._first[job]
        elapsed = time.monotonic() - start
        note = f"task {at.task + 1}/{at.tasks}"
        if elapsed > 0 and at.position > position:
            note += f"  {(at.position - position) / elapsed:.1f} batches/s"
        if at.accuracy is not None:
            note += f"  accuracy {at.accuracy:.3f}"
        self._progress.update(self._lines[job], completed=at.position, note=note)
        under_way = sum(
            self._progress._tasks[line].completed / (self._progress._tasks[line].total or 1)
            for line in self._lines.values()
        )
        self._progress.update(self._all, completed=self._weight + under_way)

    def on_outcome(self, outcome: Outcome) -> None:
        """A run is over."""
        if outcome.job in self._lines:
            self._progress.remove_task(self._lines.pop(outcome.job))
        self._weight += 1
        self._progress.update(self._all, completed=self._weight)
        if outcome.status == "failed":
            message = f"{outcome.job.folder}: {outcome.problem}"
            self.console.print(message, style="red", markup=False, soft_wrap=True)
        elif not self.console.is_terminal:
            self.console.print(f"{outcome.job.folder}: {outcome.status}", soft_wrap=True)
