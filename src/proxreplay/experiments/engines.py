"""A study: many runs, in parallel processes, that go on when one of them fails.

The seam for other engines is narrow: an `Engine` takes jobs and says what became of each; the run
itself is in its folder. `ray_engine.RayEngine` does no more.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal, Protocol

from proxreplay.allocator import keep_freed_memory
from proxreplay.errors import CheckpointError, DataError, InputError, ProxreplayError, StorageError
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.ownership import mark_failed, owned
from proxreplay.experiments.run import Interrupted, RunOptions, RunProgress, run
from proxreplay.options import count

REFUSALS = (InputError, DataError, CheckpointError, StorageError)


@dataclass(frozen=True)
class Job:
    """One run to be made: what, where, and how."""

    config: RunConfig
    folder: Path
    options: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    # refused: what was given cannot be used, and nothing was computed
    status: Literal["complete", "interrupted", "refused", "failed"]
    problem: str | None = None


Outcomes = list[Outcome]


class Audience:
    """Who is told how runs go on; this one does not listen."""

    def on_progress(self, job: Job, at: RunProgress) -> None:
        """A run has done another batch."""

    def on_outcome(self, outcome: Outcome) -> None:
        """A run is over."""


NOBODY = Audience()


class Engine(Protocol):
    """Makes runs. Jobs not started when a stop is requested are left out of the outcomes."""

    def make(self, jobs: Sequence[Job], stop: StopRequest, told: Audience = NOBODY) -> Outcomes:
        """Make every run; tell of its progress and, once each, what became of it."""
        ...


def make_one(job: Job, stop: StopRequest, on_progress: Callable[[RunProgress], None]) -> Outcome:
    """Make one run here and now; an error becomes part of the outcome."""
    begun = False

    def tell(progress: RunProgress) -> None:
        nonlocal begun
        begun = True
        on_progress(progress)

    try:
        run(job.config, job.folder, job.options, stop=stop, on_progress=tell)
    except Interrupted as interruption:
        return Outcome(job, "interrupted", str(interruption))
    except ProxreplayError as error:
        refused = isinstance(error, REFUSALS) and not begun
        return Outcome(job, "refused" if refused else "failed", str(error))
    except Exception as error:
        return Outcome(job, "failed", f"{type(error).__name__}: {error}")
    return Outcome(job, "complete")


def lost(job: Job, problem: str) -> Outcome:
    """The outcome of a job whose process is gone; its folder says so too."""
    if (job.folder / "config.yaml").exists():
        with suppress(ProxreplayError), owned(job.folder, job.config):
            mark_failed(job.folder, problem)
    return Outcome(job, "failed", problem)


@dataclass(frozen=True)
class InlineEngine:
    """One run after the other in this process."""

    def make(self, jobs: Sequence[Job], stop: StopRequest, told: Audience = NOBODY) -> Outcomes:
        """Make every run, in order."""
        outcomes = []
        for job in jobs:
            if stop:
                break
            outcome = make_one(job, stop, lambda progress, job=job: told.on_progress(job, progress))  # type: ignore[misc]
            told.on_outcome(outcome)
            outcomes.append(outcome)
        return outcomes


@dataclass(frozen=True)
class ProcessEngine:
    """Several runs at a time, each in a process of its own kind that is reused for the next."""

    processes: int  # how many at a time

    def __post_init__(self) -> None:
        count(jobs=self.processes)

    def make(self, jobs: Sequence[Job], stop: StopRequest, told: Audience = NOBODY) -> Outcomes:
        """Make every run; a process that dies costs its own run only."""
        waiting = deque(jobs)
        workers = [_Worker() for _ in range(min(self.processes, len(jobs)))]
        outcomes: list[Outcome] = []
        try:
            while True:
                for worker in workers:
                    if waiting and worker.job is None and not stop:
                        worker.start(waiting.popleft())
                busy = {w.connection: w for w in workers if w.job is not None}
                if not busy:
                    break
                if stop:
                    for worker in busy.values():
                        worker.stop.set()
                for connection in wait(list(busy), timeout=0.2):
                    worker = busy[connection]  # type: ignore[index]
                    message = worker.receive()
                    if isinstance(message, RunProgress):
                        assert worker.job is not None
                        told.on_progress(worker.job, message)
                    else:
                        told.on_outcome(message)
                        outcomes.append(message)
                        worker.job = None
        except BaseException:  # such as a second Ctrl-C: stop at once; checkpoints stay
            for worker in workers:
                worker.process.kill()
            raise
        finally:
            for worker in workers:
                worker.close()
        return outcomes


class _Worker:
    """A process that makes runs, one at a time, and the pipe to it."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.stop = context.Event()
        arguments = (theirs, self.stop)
        self.process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: Job) -> None:
        if not self.process.is_alive():
            self.connection.close()
            self._spawn()
        self.job = job
        self.connection.send(job)

    def receive(self) -> Any:
        """A `RunProgress`, or the `Outcome` of the job; a dead process is a failed outcome."""
        assert self.job is not None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return lost(self.job, f"its process ended with exit code {self.process.exitcode}")

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _work(connection: Connection, event: Event) -> None:
    """What a worker process does: wait for jobs, make them, say how it goes."""
    # the parent asks by the event; a signal to this process stops the run at hand only
    stop = StopRequest(event.is_set)

    def tell(message: Any) -> None:
        try:
            connection.send(message)
        except OSError:  # the parent is gone: save and leave
            stop.ask(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop.ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which asks us
    keep_freed_memory()
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        stop.signal = None
        tell(make_one(job, stop, tell))
