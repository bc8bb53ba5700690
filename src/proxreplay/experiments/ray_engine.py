"""A study on Ray: one run is one task, on this machine or on a cluster.

The run's folder is the truth, so a task can be lost and tried again at any moment, and the same
study can be begun with one engine and finished with another.
"""

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxreplay.data.roots import data_root
from proxreplay.errors import InputError, StorageError, first_line
from proxreplay.experiments.engines import NOBODY, Audience, Job, Outcome, Outcomes, lost
from proxreplay.experiments.interrupt import StopRequest, handled_by
from proxreplay.experiments.ray_worker import Channel, Surroundings, names_in, versions, work
from proxreplay.experiments.run import RunProgress
from proxreplay.files import marker
from proxreplay.lazy import LazyModule
from proxreplay.options import count

ray: Any = LazyModule("ray")
log = logging.getLogger(__name__)

NODE = "ray.io/node-id"  # the label that Ray gives every node
OBJECT_STORE_BYTES = 80 << 20  # results are in folders; nothing large goes through Ray
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_FOR_NEWS = 10.0


@dataclass(frozen=True)
class RayEngine:
    """Each run is a Ray task that declares its CPU threads and GPU; lost workers are replaced.

    Args:
        address: of a cluster to join, or ``auto``; None for ``RAY_ADDRESS``, else a local one that
            ends with the study.
        at_a_time: runs at a time; None for as many as there is room for.
        retries: attempts after the first for a run whose worker or node is lost.
        patience: seconds to wait for a lost worker that is still at work in a run's folder.
    """

    address: str | None = None
    at_a_time: int | None = None
    retries: int = 5
    patience: float = 60.0

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            raise InputError("engine ray: Ray is not installed; install 'proxreplay[ray]'.")
        if "://" in (address := self._wanted()):
            raise InputError(
                f"address={address}: Ray Client is not supported, its driver would not see the run "
                "folders. Start the command on a node of the cluster, or with ray job submit; give "
                "HOST:PORT as ray start prints it, or auto."
            )
        count(jobs=self.at_a_time)

    def _wanted(self) -> str:
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    def make(self, jobs: Sequence[Job], stop: StopRequest, told: Audience = NOBODY) -> Outcomes:
        """Make every run; what Ray loses is tried again, what is complete is left alone."""
        if not jobs:
            return []
        _check_devices(jobs)
        with _connected(self._wanted(), jobs), ExitStack() as markers:
            study = _Study(self, jobs, _surroundings(jobs, markers), told)
            try:
                return study.finish(stop)
            except BaseException:  # such as a second Ctrl-C: stop at once; checkpoints stay
                study.abandon()
                raise


class _Study:
    """The driver's side of a study in progress."""

    def __init__(
        self, engine: RayEngine, jobs: Sequence[Job], around: Sequence[Surroundings], told: Audience
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        place = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        self.engine, self.jobs, self.around, self.told = engine, jobs, around, told
        self.channel: Any = ray.remote(Channel).options(**place).remote()
        self.waiting = deque(range(len(jobs)))
        self.running: dict[Any, int] = {}
        self.started: set[int] = set()
        self.cancelled: set[int] = set()
        self.avoided: dict[str, str] = {}  # nodes that cannot make a run, and why
        self.outcomes: list[Outcome] = []

    def finish(self, stop: StopRequest) -> list[Outcome]:
        """Submit, listen and collect until nothing is left to do."""
        stopping = False
        limit = self.engine.at_a_time or len(self.jobs)
        while self.running or (self.waiting and not stop):
            while self.waiting and len(self.running) < limit and not stop:
                self._submit(self.waiting.popleft())
            if stop and not stopping:
                stopping = True
                self.cancelled = {*self.running.values()} - self.started
                for ref, number in self.running.items():
                    if number in self.cancelled:
                        ray.cancel(ref)
            over, _ = ray.wait([*self.running], timeout=SECONDS_BETWEEN_LOOKS)
            self._listen(bool(stop))
            for ref in over:
                self._conclude(ref, self.running.pop(ref))
        return self.outcomes

    def abandon(self) -> None:
        """End every worker at once."""
        for ref in self.running:
            ray.cancel(ref, force=True)

    def _submit(self, number: int) -> None:
        cpus, gpus = _needs(self.jobs[number])
        needs: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_retries": self.engine.retries,
            "name": f"proxreplay {self.jobs[number].folder.name}",
        }
        if self.avoided:
            needs["label_selector"] = {NODE: f"!in({','.join(self.avoided)})"}
        arguments = (_absolute(self.jobs[number]), self.around[number], self.channel)
        task = ray.remote(work).options(**needs)
        self.running[task.remote(number, *arguments, self.engine.patience)] = number

    def _listen(self, stop: bool) -> None:
        """Hand on what the workers have told since the last time."""
        try:
            news = ray.get(self.channel.collect.remote(stop), timeout=SECONDS_FOR_NEWS)
        except ray.exceptions.RayError as error:  # Ray starts it again
            log.info("no news from the workers: %s", error)
            return
        busy = {*self.running.values()}
        for number, progress in news.items():
            self.started.add(number)
            if progress is not None and number in busy:
                self.told.on_progress(self.jobs[number], RunProgress(*progress))

    def _conclude(self, ref: Any, number: int) -> None:
        """Say what became of a run, or try it on another node."""
        job = self.jobs[number]
        try:
            node, status, problem = ray.get(ref)
        except ray.exceptions.RayError as error:
            if number in self.cancelled:  # however Ray has ended it
                return
            outcome = lost(job, f"{type(error).__name__}: {first_line(error)}")
        else:
            if status == "unstarted":
                return
            if status == "misplaced":
                if self._elsewhere(job, node, problem):
                    self.waiting.append(number)
                    return
                status = "failed"
            outcome = Outcome(job, status, problem)
        self.told.on_outcome(outcome)
        self.outcomes.append(outcome)

    def _elsewhere(self, job: Job, node: str, problem: str) -> bool:
        """Whether nodes with room are left once one that cannot make the run is avoided."""
        if node not in self.avoided:
            log.warning("%s Other nodes are tried.", problem)
        self.avoided[node] = problem
        return any(n["NodeID"] not in self.avoided and _fits(job, n) for n in _nodes())


def _absolute(job: Job) -> Job:
    """The same job for a worker, whose working folder is another one."""
    options = replace(job.options, data_root=data_root(job.options.data_root).absolute())
    return replace(job, folder=job.folder.absolute(), options=options)


def _surroundings(jobs: Sequence[Job], markers: ExitStack) -> list[Surroundings]:
    """What workers must see, for each job; a marker in every folder that holds runs."""
    marked: dict[Path, Path] = {}
    for folder in dict.fromkeys(_absolute(job).folder.parent for job in jobs):
        try:
            marked[folder] = markers.enter_context(marker(folder))
        except OSError as error:
            raise StorageError(
                f"{folder}: cannot write ({error.strerror}); choose another --out."
            ) from error
    found: list[Surroundings] = []
    for job in map(_absolute, jobs):
        assert job.options.data_root is not None
        own = [Path(job.config.stream.data).absolute()] if job.config.stream.data else []
        data = [(p, names_in(p)) for p in (job.options.data_root, *own) if p.exists()]
        found.append(Surroundings(marked[job.folder.parent], Path.cwd(), tuple(data), versions()))
    return found


def _check_devices(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.config.device.startswith("cuda:"):
            raise InputError(
                f"device={job.config.device}: Ray chooses the GPU of a run; give device=cuda."
            )


@contextmanager
def _connected(address: str, jobs: Sequence[Job]) -> Iterator[None]:
    """Join a cluster, or start one here that ends with the block; one we joined goes on."""
    if ray.is_initialized():  # by the program that calls us
        _check_room(jobs, joined=True)
        yield
        return
    _check_answers(address)
    options: dict[str, Any] = {"address": address, "log_to_driver": False}
    options["logging_level"] = logging.ERROR
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cores = max(os.cpu_count() or 1, *(job.config.threads for job in jobs))
        options |= {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES}
        options["include_dashboard"] = False
    try:
        with _own_handler():
            ray.init(**options)
    except Exception as error:  # Ray raises this very class if it does not start in time
        raise _not_joined(address, error) from error
    try:
        _check_room(jobs, joined=address != "local")
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse an address where nobody answers; Ray would try for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"address={address}; give HOST:PORT as ray start prints it, or auto.")
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_FOR_NEWS).close()
    except (OSError, OverflowError) as error:
        raise _not_joined(address, error) from error


def _not_joined(address: str, error: BaseException) -> InputError:
    if address == "local":
        return InputError(f"engine ray: no Ray could be started here ({first_line(error)}).")
    return InputError(
        f"address={address}: no Ray cluster can be joined there ({first_line(error)}). Start one "
        "with ray start --head, or leave --address out."
    )


def _own_handler() -> AbstractContextManager[object]:
    """Ray replaces the driver's handler of SIGTERM; ours asks the workers to save."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return handled_by(signal.getsignal(signal.SIGTERM), signal.SIGTERM)


def _check_room(jobs: Sequence[Job], *, joined: bool) -> None:
    """A run that no node has room for would wait forever; a cluster that we joined may grow."""
    nodes = _nodes()
    for (cpus, gpus), job in {_needs(job): job for job in jobs}.items():
        if any(_fits(job, node) for node in nodes):
            continue
        text = f"no Ray node has {cpus} CPUs and {gpus} GPUs, which a run asks for"
        if not joined:
            raise InputError(f"{text}; give fewer threads, or device=cpu.")
        log.warning("%s; such runs wait until a node that has them joins.", text)


def _needs(job: Job) -> tuple[int, int]:
    """CPUs and GPUs of a run."""
    return job.config.threads, int(job.config.device.startswith("cuda"))


def _fits(job: Job, node: dict[str, Any]) -> bool:
    """Whether a node, when idle, has room for a run."""
    cpus, gpus = _needs(job)
    has = node["Resources"]
    return bool(has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus)


def _nodes() -> list[dict[str, Any]]:
    """What Ray knows of every node that is alive."""
    return [node for node in ray.nodes() if node["Alive"]]
