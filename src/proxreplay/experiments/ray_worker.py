"""What happens on a Ray worker: one run in its folder, told to the driver as it goes.

The folder is the truth. A worker that is lost loses what was learned after its last checkpoint, and
whoever makes the run next goes on from there.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxreplay.errors import InputError
from proxreplay.experiments.interrupt import StopRequest, handled_by
from proxreplay.lazy import LazyModule
from proxreplay.locking import locked

if TYPE_CHECKING:
    from proxreplay.experiments.engines import Job
    from proxreplay.experiments.run import RunProgress

ray: Any = LazyModule("ray")
SECONDS_BETWEEN_NEWS = 0.2
SECONDS_WITHOUT_DRIVER = 60.0
Report = tuple[str, str, str | None]  # id of the node, status, problem
News = dict[int, tuple[Any, ...] | None]


class Channel:
    """A Ray actor between the driver and its workers: progress one way, a stop the other way.

    Ray may start it again at any time: the driver repeats its wish, and old news is not needed.
    """

    def __init__(self) -> None:
        self._news: News = {}
        self._stop = False

    def tell(self, number: int, progress: tuple[Any, ...] | None) -> bool:
        """A worker says how far a run is; the reply is whether to stop."""
        self._news[number] = progress
        return self._stop

    def collect(self, stop: bool) -> News:
        """The driver takes the newest progress of each run, and says whether to stop."""
        news, self._news, self._stop = self._news, {}, stop
        return news


@dataclass(frozen=True)
class Surroundings:
    """What a worker must have in common with the driver."""

    marker: Path  # a file in the folder of the study that is there while the driver is at work
    cwd: Path  # the driver's working folder, which relative paths in a configuration start from
    # what the driver sees of the data: names in each folder, nothing for a file
    data: tuple[tuple[Path, tuple[str, ...]], ...]
    versions: tuple[tuple[str, str], ...]  # of what decides the results

    def check(self) -> None:
        """Raise an InputError that names what this node does not have."""
        here = f"node {socket.gethostname()}"
        if not self.marker.exists():
            raise InputError(
                f"{here} does not see {self.marker.parent} as the driver sees it; put --out on a "
                "file system that all nodes share."
            )
        for path, names in self.data:
            missing = "it" if not path.exists() else _first_missing(path, names)
            if missing:
                raise InputError(
                    f"{here}: {path}: {missing} is missing here, but the driver has it; put the "
                    "data on a file system that all nodes share, or copy it to every node."
                )
        present = dict(versions())
        for name, theirs in self.versions:
            if theirs != (ours := present.get(name, "unknown")):
                raise InputError(
                    f"{here} has {name} {ours}, but the driver has {theirs}; install the same "
                    "version on every node."
                )

    def entered(self) -> AbstractContextManager[None]:
        """Work where the driver works, if that folder is here."""
        return chdir(self.cwd) if self.cwd.is_dir() else nullcontext()


def versions() -> tuple[tuple[str, str], ...]:
    """Of proxreplay, its source code and torch here."""
    from importlib.metadata import version

    from proxreplay import __version__
    from proxreplay.experiments import environment

    source = ("source code of proxreplay", environment.code_digest()[:8])
    return (("proxreplay", __version__), source, ("torch", version("torch")))


def names_in(path: Path) -> tuple[str, ...]:
    """The visible names in a folder; none for a file."""
    if not path.is_dir():
        return ()
    return tuple(sorted(p.name for p in path.iterdir() if not p.name.startswith(".")))


def _first_missing(path: Path, names: tuple[str, ...]) -> str | None:
    present = {*names_in(path)}
    return next((name for name in names if name not in present), None)


def work(number: int, job: "Job", around: Surroundings, channel: Any, patience: float) -> Report:
    """Make one run, or what is missing of it; the task that Ray runs, and runs again.

    The status is that of an `Outcome`, or "misplaced" if this node cannot make the run, or
    "unstarted" if the driver had asked to stop before it began. ``number`` is that of the job among
    the driver's; folder and data root of the job are absolute. ``channel`` is a handle of a
    `Channel`, ``patience`` how long to wait for an earlier attempt still at work in the folder.
    """
    from proxreplay.allocator import keep_freed_memory
    from proxreplay.experiments.engines import make_one

    stop, node = StopRequest(), ray.get_runtime_context().get_node_id()
    # Ray cancels with SIGINT and ends workers with SIGTERM; both let the run save first
    with handled_by(stop.ask, signal.SIGINT, signal.SIGTERM):
        try:
            around.check()
        except InputError as problem:
            return node, "misplaced", str(problem)
        line = _Line(channel, number, stop)
        if _wait_until_free(job.folder / "lock", patience, line.asked_to_stop):
            return node, "unstarted", None
        keep_freed_memory()
        with around.entered():
            outcome = make_one(job, stop, line.tell)
    if stop.signal == signal.SIGTERM and outcome.status == "interrupted":
        os.kill(os.getpid(), signal.SIGTERM)  # saved; Ray ends this worker and retries elsewhere
    return node, outcome.status, outcome.problem


class _Line:
    """A worker's line to the driver; it never blocks a run."""

    def __init__(self, channel: Any, number: int, stop: StopRequest) -> None:
        self._channel = channel
        self._number = number
        self._stop = stop
        self._heard = self._told = time.monotonic()
        self._reply: Any = None
        self._send(None)

    def asked_to_stop(self) -> bool:
        """Wait for the reply to what was told last."""
        try:
            asked = bool(ray.get(self._reply, timeout=SECONDS_WITHOUT_DRIVER))
        except ray.exceptions.RayError:  # it is being started again; `tell` will hear
            asked = False
        self._send(None)
        return asked

    def tell(self, progress: "RunProgress") -> None:
        """Say how far the run is, now and then, and hear whether to stop."""
        now = time.monotonic()
        if now - self._told < SECONDS_BETWEEN_NEWS:
            return
        if ray.wait([self._reply], timeout=0)[0]:
            try:
                if ray.get(self._reply):
                    self._stop.signal = signal.SIGINT
                self._heard = now
            except ray.exceptions.RayError:
                pass  # the channel is being started again, or its driver is gone: see below
            self._send(astuple(progress))
        if now - self._heard > SECONDS_WITHOUT_DRIVER:
            self._stop.signal = signal.SIGINT

    def _send(self, progress: tuple[Any, ...] | None) -> None:
        self._reply = self._channel.tell.remote(self._number, progress)
        self._told = time.monotonic()


def _wait_until_free(lock: Path, patience: float, asked_to_stop: Callable[[], bool]) -> bool:
    """Wait until nobody holds a run's lock: a worker that was lost may need a moment to end.

    Returns:
        Whether the driver asked to stop meanwhile.
    """
    until = time.monotonic() + patience
    while not (asked := asked_to_stop()) and lock.exists() and time.monotonic() < until:
        try:
            with locked(lock):
                break
        except BlockingIOError:
            time.sleep(0.5)
    return asked
