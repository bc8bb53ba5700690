"""Processes with a gloo group between them, started once for many checks."""

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

IMPORTED = ["torch.distributed", "proxreplay.proximal", "proxreplay.experiments.run"]  # only once


class Pool:
    """Calls functions of test modules in all of its processes at once.

    After a failure all of them are replaced: those that are left may wait for a message that never
    comes, or take it for another one.
    """

    patience = 2.0  # seconds that the others have to say something too after one has failed

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder, self.starts = size, folder, 0
        self.pipes: list[Any] = []
        self.workers: list[Any] = []
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.starts += 1
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.size, self.folder / f"store-{self.starts}")
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self.pipes.append(ours)
            self.workers.append(worker)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns in every process; a failure in one is raised here."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            failed = any(not fine for fine, _ in answers.values())
            silent = {p: rank for rank, p in enumerate(self.pipes) if rank not in answers}
            said = wait([*silent], self.patience if failed else None)
            if not said:
                break
            answers |= {silent[pipe]: self._receive(silent[pipe]) for pipe in said}
        problems = [text for _, (fine, text) in sorted(answers.items()) if not fine]
        if problems:
            self.close(patience=0)
            self._start()
        assert not problems, "\n".join(problems)
        return [answers[rank][1] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.workers[rank].join()
            return False, f"process {rank} ended with exit code {self.workers[rank].exitcode}"

    def close(self, patience: float = 20) -> None:
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join(timeout=patience)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self.pipes, self.workers = [], []


@contextmanager
def pool(size: int) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory() as folder:
        started = Pool(size, Path(folder))
        try:
            yield started
        finally:
            started.close()


def _work(pipe: Any, rank: int, size: int, store: Path) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, f"process {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()


def problem_of(action: Callable[[], Any]) -> str:
    """The error that an action ends with, as ``Type: message``; it must end with one of ours."""
    from proxreplay.errors import ProxreplayError

    try:
        action()
    except ProxreplayError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")
